"""Read ranks' answers as the judge of `mini_dist.course.grade` does: only plain data."""

import io

from mini_dist.course.grade import judge


class OnlyData(judge.Reader):
    """A reader that refuses anything but data before looking it up."""

    def find_class(self, module, name):
        judge.only_data("pickle.find_class", (module, name))
        return super().find_class(module, name)


def from_frames(frames):
    return OnlyData(io.BytesIO(frames[0]), buffers=frames[1:]).load()
