# WRONG: unused parameters get a gradient of zeros (so that all ranks reduce the same list). "Frozen and unused parameters keep None".
import torch, torch.distributed as dist
def gradients_at_scale(model, batches, loss_of, group):
    handles, done, n = [], set(), group.size() * len(batches)
    def hook(p):
        done.add(p); p.grad /= n
        handles.append(dist.all_reduce(p.grad, group=group, async_op=True))
    for b in batches[:-1]: loss_of(model, b).backward()
    hooks = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters() if p.requires_grad]
    loss_of(model, batches[-1]).backward()
    for h in hooks: h.remove()
    for p in model.parameters():
        if p.requires_grad and p not in done:
            if p.grad is None: p.grad = torch.zeros_like(p)
            hook(p)
    for h in handles: h.wait()
