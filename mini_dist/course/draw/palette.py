"""The colors that all figures share. Each stands out on a white and on a black page."""

PHASE_COLORS = {
    "setup": "#bdbdbd",
    "forward": "#9ecae1",
    "backward": "#fdbe85",
    "step": "#a1d99b",
}

RANK_COLORS = [  # The first four still differ when they are paler, as in `scores`.
    "#2171b5",
    "#d95f02",
    "#31a354",
    "#756bb1",
    "#6baed6",
    "#de2d26",
    "#999999",
    "#8c6d31",
]

CHUNK_COLORS = ["#9ecae1", "#fdae6b", "#a1d99b", "#dadaeb"]

LINE_COLORS = ["#3182bd", "#f08a3c", "#31a354", "#de2d26", "#756bb1", "#8c6d31", "#e377c2"]

BAR_COLORS = ["#d95f02", "#7570b3", "#1b9e77", "#999999"]
