"""Not simulated: torch's own CPU allocator fails, because the operating system gives no more."""

import json
import subprocess
import sys
import textwrap

SCRIPT = """
import json, resource, sys
import torch
from torch import nn
torch.set_num_threads(1)
from adaptive_trainer import AdaptiveTrainer
import adaptive_trainer.trainer

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(256, 1)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def run(limit):
    torch.manual_seed(0)
    model = Wide()
    x = torch.randn(48 * 1024, 256)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    trainer = AdaptiveTrainer(model, data, loss=nn.functional.mse_loss, batch_size=16 * 1024, steps=3, progress=False,
                              optimizer=lambda p: torch.optim.SGD(p, lr=0.01))
    if limit:
        held = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (held + 200 * 2**20, resource.RLIM_INFINITY))
    return trainer.fit(), model

limited, model = run(True)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
free, reference = run(False)
print(json.dumps({
    "rungs": [event.rung for event in limited.fallbacks],
    "messages": [event.message for event in limited.events if event.event == "out_of_memory"],
    "steps": limited.steps,
    "apart": max(float((a - b).abs().max()) for a, b in zip(model.parameters(), reference.parameters())),
}))
"""


def test_training_recovers_from_the_allocators_own_failure():
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=110, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["steps"] == 3
    assert "halve_batch" in found["rungs"]
    assert all("DefaultCPUAllocator" in message for message in found["messages"])
    assert found["apart"] < 1e-5
