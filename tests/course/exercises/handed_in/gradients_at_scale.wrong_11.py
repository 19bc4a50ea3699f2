# WRONG: calls model.train() / zero_grad on entry... i.e. "Change nothing else in the model": model.eval() for determinism; dropout is off.
import torch.distributed as dist
def gradients_at_scale(model, batches, loss_of, group):
    model.eval()
    handles, done, n = [], set(), group.size() * len(batches)
    def hook(p):
        done.add(p); p.grad /= n
        handles.append(dist.all_reduce(p.grad, group=group, async_op=True))
    for b in batches[:-1]: loss_of(model, b).backward()
    hooks = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    loss_of(model, batches[-1]).backward()
    for h in hooks: h.remove()
    for p in model.parameters():
        if p.grad is not None and p not in done: hook(p)
    for h in handles: h.wait()
