"""TinyLLaVA-Video-R1 (Zhang et al. 2025, arXiv:2504.09641): questions with options about short videos of NExT-QA.

A row names its video by the path of its file, which PyAV reads. A tenth of the examples is held out as test.parquet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from command import Row, parser, run, save_dir, write
from source import Example, HubDataset, asked, hold_out, made_rows, prompt_row, text_of
from verl.errors import DataError
from verl.storage import expand

HUB_NAME = "Zhang199/TinyLLaVA-Video-R1-training-data"
QUESTIONS = "nextqa_0-30s.jsonl"
INSTRUCTION = "Think first, within <think> </think>, and then put the letter of one option within <answer> </answer>."
PUBLISHED = HubDataset(HUB_NAME, ("problem", "solution", "video_filename"), {"nextqa_0-30s": "train"})


class Videos:
    """Makes rows, and counts the videos that are not there.

    Args:
        folder: that the names of the videos are relative to.
        sampling: how many pictures a video is read as.
    """

    def __init__(self, folder: Path, sampling: dict[str, float], instruction: str):
        self.folder, self.sampling, self.instruction = folder, sampling, instruction
        self.missing: list[Path] = []

    def to_row(self, example: Example, index: int, split: str, where: str) -> Row:
        """One row in the schema of the RL dataset, with its video."""
        problem, solution = text_of(example, "problem", where), text_of(example, "solution", where)
        name = text_of(example, "video_filename", where)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError("the name of a video leads out of its folder", key=f"{where}, video_filename", got=name)
        video = self.folder / name
        if not video.is_file():
            self.missing.append(video)
        extra = {"split": split, "index": index, "question": problem, "answer": solution, "video_path": str(video)}
        question = asked(f"<video>\n{problem}", self.instruction, "\n\n")
        row = prompt_row(HUB_NAME, question, solution, extra, ability="video_qa")
        return {**row, "videos": [{"video": str(video), **self.sampling}]}


def main(argv: Sequence[str] | None = None) -> None:
    made = parser("Write questions about videos as train.parquet and test.parquet.", "~/data/tinyllava_video_r1")
    made.add_argument("--data_dir", default="~/data/tinyllava-video-r1", help=f"folder with {QUESTIONS} and NextQA/")
    made.add_argument("--video_fps", type=float, default=1.0, help="pictures per second of a video")
    made.add_argument("--video_max_frames", type=int, default=32, help="most pictures of a video")
    made.add_argument("--instruction", default=INSTRUCTION, help="what follows every question; '' for nothing")
    arguments = made.parse_args(argv)
    source = Path(expand(arguments.data_dir)).absolute()
    if not (source / QUESTIONS).is_file():
        fix = f"hf download {HUB_NAME} --repo-type dataset --local-dir {source}, and unpack NextQA.zip there."
        raise DataError("the questions are not there", key="--data_dir", got=str(source / QUESTIONS), fix=fix)
    sampling = {"fps": arguments.video_fps, "max_frames": arguments.video_max_frames}
    videos, examples = Videos(source, sampling, arguments.instruction), list(PUBLISHED.examples(source, QUESTIONS[:-6]))
    files = {}
    for split, numbers in zip(("train", "test"), hold_out(len(examples), 0.1)):
        files[f"{split}.parquet"] = made_rows(PUBLISHED, split, [examples[i] for i in numbers], videos.to_row)
    write(save_dir(arguments, made), files, arguments.hdfs_dir)
    if videos.missing:
        print(f"{len(videos.missing)} of {len(examples)} videos are not there, such as {videos.missing[0]}")


if __name__ == "__main__":
    raise SystemExit(run(main))
