from torch import nn

from elaswave_spmd import KeyedDropout, LayeredModel, P, Shardings, tie


class Block(nn.Module):
    def __init__(self, d_model, dropout, window):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.past = nn.ConstantPad1d((window - 1, 0), 0.0)
        self.conv = nn.Conv1d(d_model, d_model, window)
        self.out = nn.Linear(d_model, d_model)
        self.drop = KeyedDropout(dropout)  # the mask depends on step and sample, never on the worker

    def forward(self, x, keys):
        y = self.conv(self.past(self.norm(x).mT)).mT.relu()
        return x + self.drop(self.out(y), keys)


class MyModel(LayeredModel):
    shardings = Shardings(batch=P("dp"), layers=P("pp"), grads=P("dp"), optim=P("dp"))  # DP, PP, ZeRO-2

    def __init__(self, vocab_size, layers, d_model, dropout, window=8):
        embed = nn.Embedding(vocab_size, d_model)  # the first layer gets int64 tokens [batch, time]
        nn.init.normal_(embed.weight, std=0.02)  # the head reads it, too; other values are those of torch
        blocks = {f"block{i}": Block(d_model, dropout, window) for i in range(layers)}
        head = nn.Linear(d_model, vocab_size, bias=False)
        super().__init__({"embed": embed, **blocks, "head": head}, ties=[tie("head.weight", "embed.weight")])
