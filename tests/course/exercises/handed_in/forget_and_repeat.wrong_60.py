# WRONG: "save only x and the random generator's state until backward" (the output is kept as well, to compare with it). Shown by: any call; delete the result before backward (or let the next operation be a sum, which saves nothing): the output's storage is still alive, because the node holds it.
import torch


class Checked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, anchor):
        ctx.block, ctx.random = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        out = block(x)
        ctx.first = out.detach()
        return out

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            out = ctx.block(x)
        if not torch.equal(out, ctx.first):
            raise RuntimeError("the second forward pass computed something else")
        out.backward(grad)
        return None, x.grad, None


def forget_and_repeat(block, x):
    return Checked.apply(block, x, torch.zeros((), requires_grad=True))
