"""Python as a tool: one call, several calls of one trajectory, hostile calls, and a service instead of the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.harness.sandbox_service import serving
from verl.errors import ConfigError
from verl.sandbox import SandboxRefused
from verl.tools.loading import load_tools
from verl.tools.python_interpreter import PythonInterpreterTool
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.tools.schemas import ToolResponse

# On a machine without a layer, the tool is tested with what is there; that it is refused without being asked is below.
ANY = {"allow_missing": ["namespaces"]}


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, PythonInterpreterTool]]:
    made = {
        "plain": PythonInterpreterTool({**ANY, "default_timeout": 5}),
        "stateful": PythonInterpreterTool({**ANY, "stateful": True, "default_timeout": 2.0, "max_output_kb": 4}),
    }
    yield made
    for tool in made.values():
        asyncio.run(tool.close())


def calls(tool: PythonInterpreterTool, *codes: object) -> list[str]:
    """The answers to these calls of one trajectory."""

    async def run() -> list[str]:
        name, _ = await tool.create("trajectory 1")
        texts = [(await tool.execute(name, {"code": code}))[0].text or "" for code in codes]
        await tool.release(name)
        return texts

    return asyncio.run(run())


def test_output_and_the_value_of_the_last_line_come_back(tools):
    assert calls(tools["plain"], "print('a')\n6 * 7") == ["a\n42"]
    assert calls(tools["plain"], "x = 1") == ["(no output)"]


def test_code_in_a_fence_is_taken_out_of_it(tools):
    assert calls(tools["plain"], "```python\n1 + 1\n```", "```py\n2 + 2", "```\n3 + 3\n```\n") == ["2", "4", "6"]


def test_each_call_begins_anew_unless_the_tool_is_stateful(tools):
    assert "NameError" in calls(tools["plain"], "x = 5", "x")[1]
    assert calls(tools["stateful"], "x = 5", "x") == ["(no output)", "5"]


async def test_trajectories_do_not_see_each_others_variables(tools):
    tool = tools["stateful"]
    names = [(await tool.create())[0] for _ in range(2)]
    await tool.execute(names[0], {"code": "x = 1"})
    answers = [(await tool.execute(name, {"code": "x"}))[0].text or "" for name in names]
    for name in names:
        await tool.release(name)
    first, second = answers
    assert first == "1" and "NameError" in second


@pytest.mark.parametrize("code", [None, 5, ["print(1)"], {"a": 1}])
def test_arguments_that_are_no_code_become_a_message(tools, code):
    assert calls(tools["plain"], code) == ['Error: "code" has to be text']


def test_what_goes_wrong_is_told_to_the_model(tools):
    error, loop, flood, after = calls(
        tools["stateful"], "1 / 0", "while True: pass", "print('x' * 10000)", "print('alive')"
    )
    assert error.endswith("ZeroDivisionError: division by zero")
    assert loop == "stopped after its 2 s; its variables and files are lost"
    assert flood.startswith("xxxx") and flood.endswith("wrote more than 4 KB; its variables and files are lost")
    assert after == "alive"


def test_hostile_calls_reach_nothing(tools):
    hostile = (
        "open('/etc/passwd').read()",
        "__import__('os').system('id')",
        "import socket; socket.create_connection(('169.254.169.254', 80), 1)",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:80/', timeout=1)",
        "import subprocess; subprocess.check_output(['cat', '/etc/hostname'])",
    )
    answers = calls(tools["plain"], *hostile)
    for answer in (answers[0], *answers[2:]):
        assert "Error" in answer.splitlines()[-1] or "error" in answer.splitlines()[-1], answer
    assert "uid=" not in answers[1]


def test_metrics_say_how_a_call_ended(tools):
    async def run(code: str) -> dict:
        name, _ = await tools["plain"].create()
        return (await tools["plain"].execute(name, {"code": code}))[2]

    good, bad = asyncio.run(run("1")), asyncio.run(run("1 / 0"))
    assert (good["error"], good["timeout"], bad["error"]) == (0.0, 0.0, 1.0) and good["seconds"] > 0


def test_many_calls_at_once_are_all_answered(tools):
    async def run() -> list[str]:
        tool = tools["plain"]
        name, _ = await tool.create()
        answers = await asyncio.gather(*(tool.execute(name, {"code": f"{i} * 2"}) for i in range(12)))
        return [answer[0].text or "" for answer in answers]

    assert asyncio.run(run()) == [str(2 * i) for i in range(12)]


def test_a_machine_without_a_layer_stops_the_run_when_the_tool_is_loaded(monkeypatch: pytest.MonkeyPatch):
    from verl.sandbox import process

    start = process.KeeperProcess.__init__

    def without_landlock(self, **options):
        start(self, **{**options, "without": ("landlock",)})

    monkeypatch.setattr(process.KeeperProcess, "__init__", without_landlock)
    with pytest.raises(SandboxRefused, match="landlock"):
        PythonInterpreterTool({})


def test_it_is_loaded_from_upstreams_yaml(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_text(
        "tools:\n"
        "  - class_name: verl.tools.python_interpreter.PythonInterpreterTool\n"
        "    config: {type: native, allow_missing: [namespaces]}\n"
        "    tool_schema:\n"
        "      type: function\n"
        "      function:\n"
        "        name: python\n"
        "        description: runs it\n"
        "        parameters: {type: object, properties: {code: {type: string}}}\n"
    )
    (tool,) = load_tools(str(path)).values()
    assert tool.name == "python"
    assert calls(tool, "1 + 1") == ["2"]  # type: ignore[arg-type]
    asyncio.run(tool.close())


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"statful": True}, "Did you mean 'stateful'"),
        ({"default_timeout": "5"}, "has the wrong type"),
        ({"num_workers": -1}, "must be positive"),
        ({"allow_missing": ["everything"]}, "not a layer of the sandbox"),
        ({"sandbox_fusion_url": "http://h", "stateful": True}, "keeps no variables"),
        ({"sandbox_fusion_url": "here"}, "not the address of a service"),
    ],
)
def test_a_wrong_configuration_is_found_when_the_tool_is_loaded(config: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        PythonInterpreterTool(config)


def test_a_service_can_take_the_place_of_the_sandbox():
    def answer(question: dict) -> dict:
        result = {"status": "Finished", "return_code": 0, "stdout": f"ran {question['code']}", "stderr": ""}
        return {"status": "Success", "run_result": result}

    with serving(answer) as http:
        tool = SandboxFusionTool({"sandbox_fusion_url": http.url, "num_workers": 10, "rate_limit": 10})
        assert calls(tool, "1 + 1") == ["ran 1 + 1"]
        assert http.asked[0]["language"] == "python" and http.asked[0]["memory_limit_MB"] == 512
        assert calls(Printing({"sandbox_fusion_url": http.url, "default_timeout": 7}), "1 + 1") == ["ran print(1 + 1)"]
        assert http.asked[1]["run_timeout"] == 7 and http.asked[1]["language"] == "python"
        assert tool.execute_code("a", "ls", 3, "bash") == "ran ls"
        assert http.asked[2]["run_timeout"] == 3 and http.asked[2]["language"] == "bash"
        assert tool._remote.speaking("bash")._service is tool._remote._service, "with one bound on requests at once"
    with pytest.raises(ConfigError, match="sandbox_fusion_url: is missing"):
        SandboxFusionTool({})


class Printing(SandboxFusionTool):
    """As recipes write it: the code is changed, and run in a thread of the tool's own choice."""

    async def execute(self, instance_id, parameters, **kwargs):
        code, seconds = f"print({parameters['code']})", parameters.get("timeout", self.default_timeout)
        loop = asyncio.get_running_loop()
        async with self._async_semaphore:
            said = await loop.run_in_executor(
                None, self.execute_code, instance_id, code, seconds, self.default_language
            )
        return ToolResponse(text=said), None, None
