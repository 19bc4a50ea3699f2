# WRONG memory for some inputs: best fit, the smallest gap that is large enough instead of the lowest; often equal, sometimes more.
# Breaks "the memory used may not exceed what this rule needs ... at the lowest address".
def offsets(tensors):
    out = {}
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i][0]):
        size, b, e = tensors[i]
        gaps, top = [], 0
        for lo, hi in sorted((out[j], out[j] + tensors[j][0]) for j in out if tensors[j][1] < e and b < tensors[j][2]):
            if lo - top >= size:
                gaps.append((lo - top, top))
            top = max(top, hi)
        out[i] = min(gaps)[1] if gaps else top
    return [out[i] for i in range(len(tensors))]
