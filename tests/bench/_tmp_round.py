import torch, time
from fmegatron.optim.rounding import _bits, stochastic
from fmegatron.random import key, Key
def f(x, start, words):
    lin = torch.arange(x.numel(), device=x.device) + start
    return stochastic(x, _bits(Key(words), lin, 1))
x = torch.randn(1 << 24, device="cuda"); w = torch.tensor([5, 6], device="cuda")
g = torch.compile(f, dynamic=True)
for fn, n in ((f, "eager"), (g, "compiled")):
    t = time.time(); y = fn(x, 0, w); torch.cuda.synchronize(); print(n, "first", time.time() - t)
    t = time.time()
    for i in range(5): z = fn(x, i * 7, w)
    torch.cuda.synchronize(); print(n, (time.time() - t) / 5 * 1e3, "ms for 16.8M")
print(torch.equal(f(x, 7 << 24, w), g(x, 7 << 24, w)), torch.equal(f(x, 3, w), g(x, 3, w)))
