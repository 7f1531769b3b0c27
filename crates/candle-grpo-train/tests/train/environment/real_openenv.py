"""A calculator as an environment of OpenEnv: a tool for sums, and one that ends the episode with an answer."""

import random

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Start(Observation):
    question: str


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("calculator")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        @tools.tool
        def answer(value: int) -> str:
            """Ends the task with an answer."""
            return "right" if value == self.sum else "wrong"

        self.sum = None
        self.count = 0
        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, most=9, **options):
        draw = random.Random(seed)
        a, b = draw.randint(1, most), draw.randint(1, most)
        self.sum = a + b
        return Start(question=f"What is {a} + {b}?", reward=0.0)

    def step(self, action, **options):
        return self.rewarded(action, super().step(action, **options))

    async def step_async(self, action, **options):
        return self.rewarded(action, await super().step_async(action, **options))

    def rewarded(self, action, observation):
        self.count += 1
        if isinstance(action, CallToolAction) and action.tool_name == "answer" and observation.error is None:
            observation.done = True
            observation.reward = float(action.arguments["value"] == self.sum)
        return observation

    def _step_impl(self, action, **options):
        raise NotImplementedError

    @property
    def state(self):
        return State(step_count=self.count)


app = create_app(Calculator, CallToolAction, CallToolObservation, env_name="calculator", max_concurrent_envs=64)
