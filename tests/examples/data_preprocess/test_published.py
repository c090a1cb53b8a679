"""Every data set of the examples, from hand-written rows in the schema in which it is published, to parquet."""

from __future__ import annotations

import io
import json
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import aime2024_multiturn_w_tool
import dapo_multiturn_w_tool
import full_hh_rlhf
import geo3k
import gsm8k
import gsm8k_multiturn_sft
import gsm8k_multiturn_w_interaction
import gsm8k_multiturn_w_tool
import hellaswag
import math_dataset
import multiturn
import openr1mm
import pokemon
import preprocess_search_r1_dataset
import tinyllava_video_r1
from tests.harness.programs import python
from tests.harness.rows import write_prompts
from verl.errors import DataError
from verl.rewards import default_compute_score

Rows = list[dict[str, Any]]
PROBLEM = {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{2}$."}
DIALOGUE = {"prompt": "Human: Hi Assistant:", "response": " Hello!", "chosen": " Hello!", "rejected": " Go away."}
ENDINGS = ["peel it.", "throw it [substeps] up.", "sing.", "sleep."]
STORY = {
    "ind": 4,
    "activity_label": "Cooking",
    "ctx": "[header] A man takes an apple, then he",
    "endings": ENDINGS,
    "source_id": "x",
    "split": "train",
    "label": "0",
}
SUM = {"question": "Tom has 1 apple and buys 2. How many?", "answer": "1+2=<<1+2=3>>3\n#### 3"}


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(out, format="PNG")
    return out.getvalue()


FIGURE = {"images": [{"bytes": png(), "path": None}], "problem": "<image>Find x.", "answer": "3"}
DAPO = {"data_source": "math_dapo", "prompt": [{"role": "user", "content": "Solve: 1+1"}], "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {"index": "a1"}}  # fmt: skip
EXAM = {**DAPO, "data_source": "aime2024", "extra_info": {"index": "2024-I-1"}}


@pytest.fixture
def prepare(tmp_path):
    """Writes splits as parquet files, runs a program on their folder, and reads what it wrote."""

    def go(program, splits: dict[str, Rows], *flags: str) -> dict[str, Rows]:
        source, out = tmp_path / "source", tmp_path / "out"
        source.mkdir()
        for split, rows in splits.items():
            pq.write_table(pa.Table.from_pylist(rows), source / f"{split}.parquet")
        program.main(["--local_save_dir", str(out), "--local_dataset_path", str(source), *flags])
        return {str(p.relative_to(out))[:-8]: pq.read_table(p).to_pylist() for p in sorted(out.rglob("*.parquet"))}

    return go


def test_math_takes_the_last_boxed_answer_as_the_truth(prepare):
    nested = {**PROBLEM, "solution": r"First $\boxed{1}$, no: $\boxed{\frac{1}{2}}$."}
    found = prepare(math_dataset, {"train": [PROBLEM, nested], "test": [PROBLEM]})
    assert sorted(found) == ["test", "train"]
    assert [row["reward_model"]["ground_truth"] for row in found["train"]] == ["2", r"\frac{1}{2}"]
    first = found["train"][0]
    assert first["data_source"] == "DigitalLearningGmbH/MATH-lighteval" and first["reward_model"]["style"] == "rule"
    assert first["prompt"][0]["content"].startswith("What is $1+1$?") and r"\boxed{}" in first["prompt"][0]["content"]
    assert first["extra_info"] == {"index": 0, "split": "train", "question": "What is $1+1$?"}
    assert (first["level"], first["type"]) == ("Level 1", "Algebra")


def test_math_without_a_boxed_answer_is_an_error_with_file_and_row(prepare):
    with pytest.raises(DataError, match=r"train\.parquet, row 1: the solution has no \\boxed"):
        prepare(math_dataset, {"train": [PROBLEM, {**PROBLEM, "solution": "2"}], "test": [PROBLEM]})


def test_dialogues_for_imitation_are_a_row_with_either_answer(prepare):
    asked = {"prompt": "Human: Hi Assistant:"}
    found = prepare(full_hh_rlhf, {"train": [DIALOGUE]})
    assert found == {"sft/train": [{**asked, "response": " Hello!"}, {**asked, "response": " Go away."}]}


def test_dialogues_for_comparison_keep_the_last_quarter_for_a_test(prepare):
    dialogues = [{**DIALOGUE, "prompt": f"Human: {i} Assistant:"} for i in range(8)]
    found = prepare(full_hh_rlhf, {"train": dialogues}, "--split", "rm")
    assert sorted(found) == ["rm/test", "rm/train"]
    assert [row["prompt"][7] for row in found["rm/train"]] == list("012345")
    assert found["rm/test"][1] == {"prompt": "Human: 7 Assistant:", "chosen": " Hello!", "rejected": " Go away."}


def test_dialogues_for_rl_are_prompts_that_a_model_scores(prepare):
    (row,) = prepare(full_hh_rlhf, {"train": [DIALOGUE]}, "--split", "rl")["rl/train"]
    assert (row["chosen"], row["rejected"]) == (" Hello!", " Go away.")
    assert row["prompt"] == [{"role": "user", "content": "Human: Hi Assistant:"}]
    assert row["reward_model"] == {"style": "model", "ground_truth": " Hello!"} and row["ability"] == "alignment"


def test_a_geometry_problem_keeps_its_image(prepare):
    (row,) = prepare(geo3k, {"train": [FIGURE], "test": [FIGURE]})["test"]
    assert Image.open(io.BytesIO(row["images"][0]["bytes"])).size == (4, 3)
    assert row["reward_model"]["ground_truth"] == "3" and row["prompt"][0]["content"].startswith("<image>Find x.")


def test_a_picture_that_is_open_already_becomes_bytes():
    made = geo3k.image_bytes(Image.new("RGB", (4, 3)), "row 0")
    assert Image.open(io.BytesIO(made["bytes"])).size == (4, 3)
    with pytest.raises(DataError, match="row 0: an image is neither bytes nor a picture"):
        geo3k.image_bytes("figure.png", "row 0")


def test_a_tenth_of_a_single_split_is_held_out_as_the_hubs_own_reader_does(prepare):
    seen = {"problem": "Find x.", "solution": "<answer> 3 </answer>", "image": {"bytes": png()}, "original_answer": "3"}
    found = prepare(openr1mm, {"train": [{**seen, "problem": f"Find x{i}."} for i in range(11)]})
    expected = datasets.Dataset.from_dict({"n": list(range(11))}).train_test_split(test_size=0.1, seed=42)
    for split, rows in found.items():
        assert [row["extra_info"]["question"] for row in rows] == [f"Find x{i}." for i in expected[split]["n"]]
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    (row, _) = found["test"]
    assert row["prompt"][0]["content"].startswith("<image>\nFind x") and row["original_answer"] == "3"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "<answer> 3 </answer>"} and len(row["images"]) == 1
    assert not {"problem", "solution", "image"} & set(row)


def test_captions_become_conversations_about_an_image(prepare):
    turns = [{"from": "human", "value": "<image>Who is it?"}, {"from": "gpt", "value": "Pikachu."}]
    picture = {"conversations": turns, "images": [{"bytes": png()}]}
    found = prepare(pokemon, {"train": [picture] * 3})
    assert {name: len(rows) for name, rows in found.items()} == {"train": 2, "test": 1}
    messages = [{"role": "user", "content": "<image>Who is it?"}, {"role": "assistant", "content": "Pikachu."}]
    assert found["test"][0]["messages"] == messages and set(found["test"][0]) == {"images", "messages"}
    with pytest.raises(DataError, match="a turn is not"):
        pokemon.to_row({**picture, "conversations": [{"from": "bot", "value": "x"}]}, 0, "train", "row 0")


def test_a_question_about_a_video_names_its_file_and_how_it_is_read(tmp_path, capsys):
    asked = {"problem": "Which animal?\nOptions:\nA. owl.\nB. cat.", "solution": "<answer>B</answer>"}
    lines = [json.dumps({**asked, "video_filename": f"./NextQA/{name}.mp4"}) for name in ("there", "absent")]
    (tmp_path / "nextqa_0-30s.jsonl").write_text("\n".join(lines))
    (tmp_path / "NextQA").mkdir()
    (tmp_path / "NextQA" / "there.mp4").write_bytes(b"")
    words = ["--data_dir", str(tmp_path), "--local_save_dir", str(tmp_path / "out"), "--video_max_frames", "8"]
    tinyllava_video_r1.main(words)
    assert "1 of 2 videos are not there, such as" in capsys.readouterr().out
    rows = [pq.read_table(tmp_path / "out" / f"{name}.parquet").to_pylist()[0] for name in ("train", "test")]
    paths = {row["videos"][0]["video"] for row in rows}
    assert paths == {str(tmp_path / "NextQA" / f"{name}.mp4") for name in ("there", "absent")}
    assert rows[0]["videos"][0] | {"video": ""} == {"video": "", "fps": 1.0, "max_frames": 8}
    assert rows[0]["prompt"][0]["content"].startswith("<video>\nWhich animal?")
    with pytest.raises(DataError, match="hf download"):
        tinyllava_video_r1.main(["--data_dir", str(tmp_path / "out")])
    questions = tmp_path / tinyllava_video_r1.QUESTIONS
    questions.write_text(questions.read_text().replace("NextQA/there.mp4", "NextQA/../../there.mp4"))
    with pytest.raises(DataError, match=r"row 0, video_filename: .*leads out of its folder"):
        tinyllava_video_r1.main(words)


def test_repeated_problems_of_dapo_are_written_once_unless_they_are_kept(prepare):
    other = {**DAPO, "extra_info": {"index": "b2"}}
    (first, second) = prepare(dapo_multiturn_w_tool, {"train": [DAPO, other, DAPO]})["train"]
    assert (first["extra_info"]["index"], second["extra_info"]["index"]) == ("a1", "b2")
    tools = {"code_interpreter": {"create_kwargs": {"ground_truth": "2"}}}
    assert first == {**DAPO, "extra_info": {"index": "a1", "need_tools_kwargs": True, "tools_kwargs": tools}}


def test_repeated_problems_are_kept_on_request(prepare):
    assert len(prepare(dapo_multiturn_w_tool, {"train": [DAPO, DAPO]}, "--keep_repeats")["train"]) == 2


def test_problems_of_aime_are_in_the_same_schema(prepare):
    (row,) = prepare(aime2024_multiturn_w_tool, {"train": [EXAM]})["train"]
    assert row["data_source"] == "aime2024" and row["extra_info"]["index"] == "2024-I-1"
    assert row["extra_info"]["tools_kwargs"]["code_interpreter"]["create_kwargs"] == {"ground_truth": "2"}


WORDED = [(gsm8k, SUM), (math_dataset, PROBLEM), (geo3k, FIGURE), (gsm8k_multiturn_sft, SUM),
          (gsm8k_multiturn_w_tool, SUM)]  # fmt: skip


@pytest.mark.parametrize(("program", "example"), WORDED, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("instruction", ["Say it plainly.", ""])
def test_what_follows_a_question_can_be_worded(prepare, program, example, instruction):
    (row,) = prepare(program, {"train": [example], "test": [example]}, "--instruction", instruction)["train"]
    said = [m["content"] for m in row.get("prompt", row.get("messages")) if m["role"] == "user"]
    assert said == [f"{example.get('question', example.get('problem'))} {instruction}".strip()]


FOLDERS = {gsm8k: "gsm8k", math_dataset: "math", hellaswag: "hellaswag", geo3k: "geo3k"}


@pytest.mark.parametrize("program", FOLDERS, ids=lambda p: p.__name__)
def test_without_a_flag_the_files_lie_in_a_folder_of_the_home(tmp_path, monkeypatch, program):
    monkeypatch.setenv("HOME", str(tmp_path))
    example = {gsm8k: SUM, math_dataset: PROBLEM, hellaswag: STORY, geo3k: FIGURE}[program]
    (tmp_path / "source").mkdir()
    for split in ("train", "validation", "test"):
        pq.write_table(pa.Table.from_pylist([example]), tmp_path / "source" / f"{split}.parquet")
    program.main(["--local_dataset_path", str(tmp_path / "source")])
    assert (tmp_path / "data" / FOLDERS[program] / "train.parquet").is_file()


def test_an_ending_is_chosen_by_its_number_and_markup_is_gone(prepare):
    unanswered = {**STORY, "label": ""}
    made = prepare(hellaswag, {"train": [STORY, unanswered], "validation": [STORY], "test": [unanswered]})
    (row,), (open_row,) = made["train"], made["test"]
    assert {name: row[name] for name in STORY} == STORY and open_row["reward_model"]["ground_truth"] == ""
    text = row["prompt"][0]["content"]
    assert text.startswith("Cooking: A man takes an apple, then he") and "1: throw it up." in text
    assert "[" not in text and row["reward_model"]["ground_truth"] == "0"


def test_gsm8k_as_conversations_ends_with_the_worked_solution(prepare):
    (row,) = prepare(gsm8k_multiturn_sft, {"train": [SUM], "test": [SUM]})["train"]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert row["messages"][1]["content"] == SUM["answer"]


def test_gsm8k_with_a_tool_carries_the_tools_arguments(prepare):
    (row,) = prepare(gsm8k_multiturn_w_tool, {"train": [SUM], "test": [SUM]})["test"]
    assert row["prompt"][0]["role"] == "system" and gsm8k_multiturn_w_tool.TOOL in row["prompt"][0]["content"]
    assert row["extra_info"]["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "3"}}}
    assert row["extra_info"]["need_tools_kwargs"] is True


def test_gsm8k_with_an_interaction_says_who_answers_and_with_what(prepare):
    (row,) = prepare(gsm8k_multiturn_w_interaction, {"train": [SUM], "test": [SUM]})["train"]
    assert row["extra_info"]["interaction_kwargs"] == {"name": "gsm8k", "query": SUM["question"], "ground_truth": "3"}


QUESTION = {"id": "q1", "question": "Who wrote it?", "golden_answers": ["Jo", "J. Doe"], "data_source": "nq"}


def test_a_question_to_be_searched_names_its_scorer_and_keeps_all_its_answers(prepare):
    (row,) = prepare(preprocess_search_r1_dataset, {"train": [QUESTION], "test": [QUESTION]})["train"]
    assert row["data_source"] == "searchR1_nq" and row["reward_model"]["ground_truth"] == {"target": ["Jo", "J. Doe"]}
    assert "search" in row["extra_info"]["tools_kwargs"]
    truth = row["reward_model"]["ground_truth"]
    assert default_compute_score(row["data_source"], "<answer>j doe</answer>", truth) == 1.0


def test_all_shards_of_a_split_are_read_and_a_missing_one_is_told(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "main").mkdir(parents=True)
    for split, count in (("train", 3), ("test", 1)):
        for number in range(count):
            row = {**SUM, "question": f"{split} {number}"}
            pq.write_table(pa.Table.from_pylist([row]), source / "main" / f"{split}-{number:05}-of-{count:05}.parquet")
    words = ["--local_save_dir", str(out), "--local_dataset_path", str(source)]
    gsm8k.main(words)
    rows = pq.read_table(out / "train.parquet").to_pylist()
    assert [row["extra_info"]["question"] for row in rows] == ["train 0", "train 1", "train 2"]
    (source / "main" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match=r"shards of this split are not complete.*3 files, numbered from 0"):
        gsm8k.main(words)


def test_a_data_set_of_one_split_may_have_a_file_of_any_name(tmp_path):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist([DAPO]), tmp_path / "data" / "dapo-math-17k.parquet")
    dapo_multiturn_w_tool.main(["--local_save_dir", str(tmp_path / "out"), "--local_dataset_path", str(tmp_path)])
    assert len(pq.read_table(tmp_path / "out" / "train.parquet")) == 1


def test_without_a_folder_the_hub_is_asked_by_name_and_split(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        return [{**FIGURE, "images": [Image.new("RGB", (4, 3), "red")]}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    geo3k.main(["--local_save_dir", str(tmp_path)])
    assert asked == [("hiyouga/geometry3k", None, split) for split in ("train", "test")]
    (row,) = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert Image.open(io.BytesIO(row["images"][0]["bytes"])).size == (4, 3)


WRONG_TYPES = [
    (math_dataset, {**PROBLEM, "problem": 5}, "column 'problem' has no text"),
    (geo3k, {**FIGURE, "images": "figure.png"}, "column 'images' has no list"),
    (hellaswag, {**STORY, "endings": "peel it."}, "column 'endings' has no list"),
    (hellaswag, {**STORY, "endings": [1, 2, 3, 4]}, "not four endings"),
    (dapo_multiturn_w_tool, {**DAPO, "prompt": "Solve"}, "column 'prompt' has no list"),
    (dapo_multiturn_w_tool, {**DAPO, "reward_model": "2"}, "column 'reward_model' has no fields"),
    (aime2024_multiturn_w_tool, {**EXAM, "prompt": []}, "a prompt or its ground truth is missing"),
    (preprocess_search_r1_dataset, {**QUESTION, "golden_answers": []}, "has no answer"),
    (full_hh_rlhf, {**DIALOGUE, "chosen": 3}, "column 'chosen' has no text"),
]


@pytest.mark.parametrize(("program", "row", "said"), WRONG_TYPES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_column_of_the_wrong_type_is_named_with_file_and_row(prepare, program, row, said):
    flags = ["--split", "rm"] if program is full_hh_rlhf else []
    with pytest.raises(DataError, match=rf"train\.parquet, row 0: .*{said}"):
        prepare(program, {split: [row] for split in ("train", "validation", "test")}, *flags)


def test_the_hand_written_conversations_take_turns(tmp_path):
    multiturn.main(["--local_save_dir", str(tmp_path)])
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        roles = [m["role"] for m in row["messages"] if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("program", [math_dataset, full_hh_rlhf, geo3k, hellaswag], ids=lambda p: p.__name__)
def test_a_file_without_a_column_is_named_with_what_it_has(prepare, program):
    flags = ["--split", "sft"] if program is full_hh_rlhf else []
    with pytest.raises(DataError, match=r"train\.parquet: no column .*the file has: text"):
        prepare(program, {"train": [{"text": "a"}], "validation": [{"text": "a"}], "test": [{"text": "a"}]}, *flags)


SCRIPTS = {
    "aime2024_multiturn_w_tool": [EXAM],
    "dapo_multiturn_w_tool": [DAPO],
    "gsm8k_tool_agent_loop": [SUM],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_the_examples_names_the_agent_loop(tmp_path, project_root, script):
    for split in ("train", "test"):
        write_prompts(tmp_path / f"{split}.jsonl", SCRIPTS[script])
    file = project_root / "examples" / "data_preprocess" / f"{script}.py"
    words = [str(file), "--local_save_dir", "out", "--local_dataset_path", "."]
    words += [] if script == "gsm8k_tool_agent_loop" else ["--agent_name", "tool_agent"]
    python(*words, cwd=tmp_path)
    found = pq.read_table(next((tmp_path / "out").glob("*.parquet"))).to_pylist()
    assert {row["agent_name"] for row in found} == {"tool_agent"}
