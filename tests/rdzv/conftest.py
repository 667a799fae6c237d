from tests.rdzv.agents import agents

__all__ = ["agents"]
