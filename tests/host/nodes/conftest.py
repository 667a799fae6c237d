from tests.host.nodes.agents import agents
from tests.host.nodes.share import shares

__all__ = ["agents", "shares"]
