"""What each kind of server is asked and how it is updated, against a server that follows the documentation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.models import tiny_model_dir
from tests.harness.servers import completion, serving
from tests.rollout.server.test_sampler import PATH, ask, over
from verl.errors import RolloutError
from verl.rollout import Request, SamplingParams
from verl.rollout.server.sampler import server_folder
from verl.weight_sync import chunk_weights

ASKED = Request("a", (40, 41, 42), SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9, top_k=5))
ADJUSTED = SamplingParams(max_tokens=9, min_tokens=3, repetition_penalty=1.2)
NOT_VLLM = {"/version": (404, {})}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model_dir(tmp_path_factory.mktemp("model"), max_positions=64))


def weights(model):
    return sorted(load_file(f"{model}/model.safetensors").items())


def update(sampler, tensors, version=3):
    asyncio.run(sampler.update_weights(chunk_weights(tensors, 1 << 14, version), version))


def sglang_answer(tokens=(7, 8), reason=None):
    triples = [[-0.5 - i, token, None] for i, token in enumerate(tokens)]
    return 200, {"text": "x", "meta_info": {"finish_reason": reason or {"type": "length", "length": 2},
                                            "output_token_logprobs": triples}}  # fmt: skip


def tgi_answer(prefill=(40, 41, 42)):
    tokens = [
        {"id": 7, "text": "x", "logprob": -0.5, "special": False},
        {"id": 2, "text": "", "logprob": -0.1, "special": True},
    ]
    details = {
        "finish_reason": "eos_token",
        "prefill": [{"id": i, "text": "", "logprob": None} for i in prefill],
        "tokens": tokens,
    }
    return 200, {"generated_text": "x", "details": details}


def test_sglang_is_recognised_and_asked_in_its_own_words(model):
    """The field names are those of GenerateReqInput and SamplingParams of sglang 0.5.23."""
    with serving({**NOT_VLLM, "/get_model_info": (200, {"model_path": "m"}), "/generate": sglang_answer()}) as server:
        sampler = over(server, model, wants_log_probs=False)
        (done,) = ask(sampler, ASKED)
        payload = server.payloads("/generate")[-1]
    assert (done.token_ids, done.finish_reason) == ((7, 8), "length")
    assert payload["input_ids"] == [40, 41, 42] and payload["return_logprob"] is True and payload["rid"] == "a"
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_new_tokens": 4, "stop_token_ids": [2],
                "ignore_eos": False, "no_stop_trim": True}  # fmt: skip
    assert {name: payload["sampling_params"][name] for name in expected} == expected


def test_a_penalty_and_a_shortest_response_go_to_each_kind_in_its_own_words_or_are_refused(model):
    """Of three tokens at least one is there, so that two are left."""
    asked = Request("a", (40, 41, 42), ADJUSTED, generated_prefix=(7,))
    paths = {PATH: completion(), "/generate": sglang_answer()}
    with serving(paths) as server:
        for kind, path in (("vllm", PATH), ("sglang", "/generate")):
            ask(over(server, model, api=kind, wants_log_probs=False), asked)
            payload = server.payloads(path)[-1]
            payload = payload.get("sampling_params", payload)
            assert payload["repetition_penalty"] == 1.2
            assert payload["min_new_tokens" if kind == "sglang" else "min_tokens"] == 2
        for kind, said in (("openai", "no repetition penalty"), ("tgi", "has no shortest response")):
            (error,) = ask(over(server, model, api=kind, wants_log_probs=False), asked)
            assert isinstance(error, RolloutError) and said in str(error)


def test_raw_log_probs_of_sglang_contain_the_penalty_and_are_refused_with_it(model):
    def answer(payload):  # -0.5 at any temperature
        return sglang_answer((7,) * payload["sampling_params"]["max_new_tokens"])

    with serving({"/generate": answer}) as server:
        sampler = over(server, model, api="sglang", logprobs_mode="raw_logprobs")
        scaled, penalised = (SamplingParams(max_tokens=1, temperature=0.7, repetition_penalty=p) for p in (1.0, 1.2))
        (done,) = ask(sampler, Request("a", (40,), scaled))
        (error,) = ask(sampler, Request("b", (40,), penalised))
    assert done.log_probs == (-0.5,)
    assert "contain the repetition penalty" in str(error)


def test_the_log_probs_of_sglang_belong_to_their_tokens(model):
    with serving({"/generate": sglang_answer((9, 8, 7))}) as server:
        plain = Request("a", (40,), SamplingParams(max_tokens=3))
        (done,) = ask(over(server, model, api="sglang"), plain)
    assert (done.token_ids, done.log_probs) == ((9, 8, 7), (-0.5, -1.5, -2.5))


def test_sglang_is_aborted_put_to_sleep_and_woken_by_its_calls(model):
    paths = {"/generate": sglang_answer(reason={"type": "abort"}), "/release_memory_occupation": (200, {}),
             "/resume_memory_occupation": (200, {})}  # fmt: skip
    with serving(paths) as server:
        sampler = over(server, model, api="sglang")

        async def run():
            await sampler.sleep(2)
            await sampler.wake()

        asyncio.run(run())
    assert server.payloads("/release_memory_occupation") == [{"tags": ["kv_cache", "weights"]}]
    assert server.count("/resume_memory_occupation") == 1


def folder_seen(seen):
    """Records what lies in the folder at the moment the server is told to read it."""

    def answer(payload):
        folder = Path(
            payload.get("model_path")
            or payload.get("kwargs", {}).get("weights_path", "")
            or "".join(payload.get("args", ["/nowhere"]))
        )
        if folder.is_dir():
            seen.append({p.name for p in folder.iterdir()})
        index = folder / "model.safetensors.index.json"
        if index.exists():
            places = json.loads(index.read_text())["weight_map"]
            seen.append({name: load_file(str(folder / file))[name] for name, file in places.items()})
        return 200, {"success": True, "message": ""}

    return answer


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_new_weights_reach_the_server_as_a_whole_folder(model, tmp_path, kind):
    seen: list = []
    call = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}[kind]
    new = [(name, tensor + 1) for name, tensor in weights(model)]
    with serving({call: folder_seen(seen), "/reset_prefix_cache": (200, {}), PATH: (200, {"choices": [{}]})}) as server:
        sampler = over(server, model, api=kind, weights_dir=str(tmp_path))
        update(sampler, new, version=3)
        update(sampler, new, version=4)
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= seen[0]
    assert all(torch.equal(seen[1][name], tensor) for name, tensor in new)
    assert sampler.version == 4 and [p.name for p in tmp_path.glob("*/*")] == ["version-4"]


def test_servers_that_share_a_folder_never_share_a_name_in_it(monkeypatch):
    """Servers that a run starts listen on loopback, on two machines perhaps at the same port."""
    names = []
    for machine in ("node-a", "node-b"):
        monkeypatch.setattr("socket.gethostname", lambda name=machine: name)
        names += [server_folder("http://127.0.0.1:30000"), server_folder("http://127.0.0.1:30001")]
        assert server_folder("http://node-c:30000") == "node-c-30000", "whoever feeds a server that runs already"
    assert len({*names}) == 4 and names[0] == "node-a-127-0-0-1-30000"


@pytest.mark.parametrize(
    ("spoil", "said"), [(lambda w: w[1:], "did not arrive"), (lambda w: [*w, ("x", torch.ones(1))], "no such weight")]
)
def test_weights_that_are_not_whole_never_reach_the_server(model, tmp_path, spoil, said):
    with serving({"/update_weights_from_disk": (200, {"success": True}), "/generate": sglang_answer()}) as server:
        sampler = over(server, model, api="sglang", weights_dir=str(tmp_path))
        with pytest.raises(RolloutError, match=said):
            update(sampler, spoil(weights(model)))
        assert server.count("/update_weights_from_disk") == 0
        assert "send them again" in str(ask(sampler, ASKED)[0])


def test_a_server_that_takes_no_weights_is_refused_by_name(model):
    for kind in ("tgi", "openai"):
        with serving({}) as server, pytest.raises(RolloutError, match=f"kind '{kind}' has no call for new weights"):
            update(over(server, model, api=kind, wants_log_probs=False), weights(model))


def test_a_vllm_server_outside_development_mode_says_how_to_start_it(model, tmp_path):
    with (
        serving({PATH: (200, {"choices": [{}]})}) as server,
        pytest.raises(RolloutError, match="VLLM_SERVER_DEV_MODE=1"),
    ):
        update(over(server, model, weights_dir=str(tmp_path)), weights(model))


def test_a_server_whose_reload_moves_log_probs_is_refused(model, tmp_path):
    reloads = []

    def answer(payload):
        shift = 0.01 * len(reloads)
        entries = [None, *({str(t): {"logprob": -1.0 - shift}} for t in payload["prompt"][1:])]
        return 200, {"choices": [{"prompt_logprobs": entries}]}

    def reload(payload):
        if payload["method"] == "verl_ready":
            return 500, {"error": "no such method"}
        reloads.append(payload)
        return 200, {}

    paths = {PATH: answer, "/collective_rpc": reload, "/reset_prefix_cache": (200, {})}
    with serving(paths) as server, pytest.raises(RolloutError, match=r"for this model.*1.0e-02"):
        update(over(server, model, weights_dir=str(tmp_path)), weights(model))
    assert reloads == [{"method": "reload_weights"}]


@pytest.mark.parametrize("has_extension", [True, False])
def test_a_tied_head_that_goes_on_with_old_embeddings_is_refused(tmp_path, has_extension):
    """With one embedding for all tokens each has the probability 1/259; this server says something else."""
    model = str(tiny_model_dir(tmp_path / "model", max_positions=64, tie_word_embeddings=True))
    calls = []

    def answer(payload):
        entries = [None, *({str(t): {"logprob": -1.0}} for t in payload["prompt"][1:])]
        return 200, {"choices": [{"prompt_logprobs": entries}]}

    def call(payload):
        calls.append(payload["method"])
        return (200 if has_extension or payload["method"] != "verl_ready" else 500), {}

    paths = {PATH: answer, "/collective_rpc": call, "/reset_prefix_cache": (200, {})}
    with (
        serving(paths) as server,
        pytest.raises(RolloutError, match=r"still uses the old ones.*worker-extension-cls"),
    ):
        update(over(server, model, weights_dir=str(tmp_path / "weights")), weights(model))
    extended = ["verl_reload_last", "verl_load_folder"]
    assert calls == ["verl_ready", *(extended if has_extension else ["reload_weights", "reload_weights"])]


def test_tgi_takes_text_and_gives_token_ids_and_log_probs(model):
    with serving({**NOT_VLLM, "/info": (200, {"model_id": "m"}), "/generate": tgi_answer()}) as server:
        sampler = over(server, model, wants_log_probs=False)
        (done,) = ask(sampler, ASKED)
        payload = server.payloads("/generate")[-1]
    assert (done.token_ids, done.finish_reason) == ((7, 2), "stop")
    assert payload["inputs"] == sampler._text().decode([40, 41, 42])
    expected = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_new_tokens": 4, "details": True}
    assert {name: payload["parameters"][name] for name in expected} == expected


def test_an_answer_of_tgi_to_another_prompt_is_refused(model):
    with serving({"/generate": tgi_answer(prefill=(40, 41))}) as server:
        (error,) = ask(over(server, model, api="tgi"), Request("a", (40, 41, 42), SamplingParams(max_tokens=4)))
    assert "made 2 other tokens of the prompt of 3" in str(error)


def test_the_prompts_of_a_vllm_server_are_sent_with_their_priority(model):
    with serving({PATH: completion()}) as server:
        ask(over(server, model), Request("a", (40,), SamplingParams(max_tokens=4), priority=3))
        assert server.payloads(PATH)[-1]["priority"] == 3
