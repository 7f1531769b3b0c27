"""Sums as an environment of verifiers, with a rubric of two rewards and a metric."""

import re

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        found = re.findall(r"\d+", trace.last_reply)
        return float(bool(found) and int(found[-1]) == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        if "crash" in trace.last_reply:
            raise RuntimeError("no disk")
        return float(len(trace.last_reply) < 20)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    count: int = 4


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.count):
            yield SumTask(SumData(prompt=f"What is {a} + 5?", answer=a + 5), self.config.task)


__all__ = ["Sums"]
