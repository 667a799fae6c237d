from tests.host.nodes.agents import agents

__all__ = ["agents"]
