"""Reading what ranks answer as the judge of `mini_dist.course.grade` does: plain data, nothing
else."""

import io

from mini_dist.course.grade import judge


class OnlyData(judge.Reader):
    """Anything that is not data is refused before it is looked up."""

    def find_class(self, module, name):
        judge.only_data("pickle.find_class", (module, name))
        return super().find_class(module, name)


def from_frames(frames):
    return OnlyData(io.BytesIO(frames[0]), buffers=frames[1:]).load()
