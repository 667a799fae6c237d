"""A replay buffer, an environment and a policy that explores: objects that share parts, made anew while the loop runs."""

import collections
import dataclasses
import random

import numpy as np
import torch
from both_ways import STEPS, begin, end, protect
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclasses.dataclass
class Episode:
    seen: torch.Tensor
    number: int = 0
    gained: float = 0.0


class Environment:
    def __init__(self, seed):
        self.noise = np.random.default_rng(seed)
        self.place, self.steps = 0.0, 0

    def reset(self):
        self.place, self.steps = float(self.noise.normal()), 0
        return torch.tensor([self.place])

    def move(self, by):
        self.steps += 1
        self.place += by + 0.1 * float(self.noise.normal())
        return torch.tensor([self.place]), -abs(self.place), self.steps > 6


rank = begin()
model = DDP(nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 3)))
target = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
environments = {"first": Environment(rank), "second": Environment(10 + rank)}
current = environments["first"]
buffer, gains, explore = collections.deque(maxlen=30), [], 1.0
random.seed(rank)
torch.manual_seed(rank)
episode = Episode(current.reset())


def play():
    global episode, current
    with torch.no_grad():
        action = random.randrange(3) if random.random() < explore else int(model.module(episode.seen).argmax())
    found, gain, over = current.move(action - 1)
    buffer.append((episode.seen, action, gain))
    episode.seen, episode.gained = found, episode.gained + gain
    if over:
        gains.append(episode.gained)
        current = environments["second" if current is environments["first"] else "first"]
        episode = Episode(current.reset(), episode.number + 1)


job = protect(model, optimizer)
for step in job.steps(STEPS):
    with step:
        for _ in range(4):
            play()
        batch = random.sample(list(buffer), min(8, len(buffer)))
        seen = torch.stack([one[0] for one in batch])
        actions = torch.tensor([one[1] for one in batch])
        wanted = torch.tensor([one[2] for one in batch])
        loss = (model(seen).gather(1, actions[:, None]).squeeze(1) - wanted).square().mean()
        loss.backward()
        explore = max(0.1, explore * 0.95)
        optimizer.step()
        optimizer.zero_grad()
        if step.index % 5 == 4:
            target = [p.detach().clone() for p in model.parameters()]
places = [(one.place, one.steps) for one in environments.values()]
end(rank, model=model, target=target, gains=gains, explore=explore, number=episode.number, places=places, last=buffer[-1])
