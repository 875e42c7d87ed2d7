"""Memory, time and communication of any layout at any scale, from the model itself, before anything is started.

    cluster = Cluster(hardware("h100"), 64)
    found = plan(Decoder(PRESETS["llama3-70b"]), cluster, seq=8192, rows=512)
    print(found.best.setting.layout, found.best.tokens_per_second, found.best.memory.total)

    estimate(model, Setting(Layout.parse("dp=8 zero=3"), rows=8, seq=8192, precision=…), cluster)      # one layout

`fmegatron plan` prints it. A model is what a pipeline wants: `spec`, `embed`, `block`, `head`.
"""

from fmegatron.plan.hardware import TABLE, Hardware, Reach, hardware
from fmegatron.plan.memory import Memory, memory
from fmegatron.plan.rank import Model, Setting
from fmegatron.plan.search import Estimate, Found, estimate, plan
from fmegatron.plan.timing import Cluster, Spent, times

__all__ = [
    "TABLE",
    "Cluster",
    "Estimate",
    "Found",
    "Hardware",
    "Memory",
    "Model",
    "Reach",
    "Setting",
    "Spent",
    "estimate",
    "hardware",
    "memory",
    "plan",
    "times",
]
