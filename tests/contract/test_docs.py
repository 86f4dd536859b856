"""What README.md and docs/ say, held to the code: flags, fields, metrics, errors, reasons, commands, file names, links."""

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

import flyball_cli
from checkpoints import make_tokenizer
from clients_kit.__main__ import CLIENTS
from flyball_cli.commands import COMMANDS
from flyball_clients import cli as clients_cli
from flyball_operator import cli as operator_cli
from flyball_operator import names, reference, status
from flyball_operator.cluster import reconciler
from flyball_operator.cluster.monitoring import Metrics as OperatorMetrics
from flyball_operator.spec import manifest, rules, schema
from flyball_operator.status import diagnosis
from flyball_operator.status import tuning as tuning_status
from flyball_operator.tuning import Reason
from flyball_protocol import Limits, LimitsUpdate, endpoints
from flyball_protocol.limits import LIMITS_HTTP_STATUS
from flyball_runtime import cli as runtime_cli
from flyball_runtime.api import ApiSettings, MetricsCollector, create_admin_app, create_app
from flyball_runtime.api import errors as api_errors
from flyball_runtime.api.embeddings import EmbeddingRequest
from flyball_runtime.api.metrics import VLLM_NAMES
from flyball_runtime.api.schemas import CHAT_NOOPS, COMPLETION_NOOPS, ChatRequest, CompletionRequest
from flyball_runtime.core.clock import FakeClock
from flyball_runtime.core.errors import RequestError
from flyball_runtime.core.model_config import SUPPORTED_ARCHITECTURES
from runtime.fake_engine import STEP_MODEL, FakeEngine, step_stats

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PACKAGES = (
    "runtime/flyball_runtime",
    "operator/flyball_operator",
    "kernels/flyball_kernels",
    "protocol/flyball_protocol",
    "clients/flyball_clients",
)
PARSERS = {
    "flyball": {
        "runtime": runtime_cli.build_parser(),
        "operator": operator_cli.build_parser("flyball"),
        "clients": clients_cli.build_parser(),
    },
    "flyball-operator": {"operator": operator_cli.build_parser()},
}

Rows = list[list[str]]


def table(page: str, *header: str) -> Rows:
    """The rows under every header of a page that begins with these cells."""
    lines = (DOCS / page).read_text().splitlines()
    blocks = [list(block) for is_row, block in groupby(lines, lambda line: line.startswith("|")) if is_row]
    tables = [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in block] for block in blocks]
    found = [row for rows in tables if rows[0][: len(header)] == list(header) for row in rows[2:]]
    assert found, f"docs/{page} has no table {header}"
    return found


def code(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def subcommand(command: str, name: str) -> argparse.ArgumentParser:
    extra = COMMANDS[name].extra if command == "flyball" else "operator"
    return commands(PARSERS[command][extra])[name]


def shown_default(action: argparse.Action) -> str:
    if action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction):
        return "off"
    return "none" if action.default is None else f"`{action.default}`"


@pytest.mark.parametrize(
    ("page", "command", "name"),
    [
        ("serving.md", "flyball", "serve"),
        ("operations.md", "flyball", "listener"),
        ("benchmarking.md", "flyball", "bench"),
        ("batch.md", "flyball", "batch"),
        ("local-mode.md", "flyball", "local"),
    ],
)
def test_every_flag_is_documented_with_its_default_and_choices(page: str, command: str, name: str) -> None:
    parser = subcommand(command, name)
    actions = {tuple(one.option_strings): one for one in parser._actions if one.option_strings and one.dest != "help"}
    documented = {tuple(code(row[0])): row for row in table(page, "Flag", "Default")}
    assert documented.keys() == actions.keys()
    for flags, (_, default, meaning) in documented.items():
        assert default == shown_default(actions[flags]), flags
        assert {str(choice) for choice in actions[flags].choices or ()} <= set(code(default + meaning)), flags


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (choices,) = (one.choices for one in parser._actions if isinstance(one.choices, dict))
    return choices


@pytest.mark.parametrize("extra", PARSERS["flyball"])
def test_help_never_shows_none_as_a_default(extra: str) -> None:
    for parser in commands(PARSERS["flyball"][extra]).values():
        assert not re.search(r"\bNone\b", parser.format_help()), parser.prog


def test_help_shows_the_default_of_every_flag_of_serve() -> None:
    parser = subcommand("flyball", "serve")
    texts = {action.dest: parser._get_formatter()._get_help_string(action) or "" for action in parser._actions}
    assert [dest for dest, text in texts.items() if "(default: " not in text] == ["help", "model"]


def test_the_port_of_an_api_is_the_same_everywhere() -> None:
    ports = {subcommand("flyball", "serve").parse_args(["model"]).port}
    ports.add(subcommand("flyball", "local").parse_args(["-f", "x"]).port)
    for client in ("chat", "bench"):
        ports.add(urlsplit(subcommand("flyball", client).parse_args([]).base_url).port)
    assert ports == {endpoints.API_PORT}


def exported_metrics() -> dict[str, str]:
    """Type by name of what /metrics of a replica has."""
    metrics = MetricsCollector(model_name="test", clock=FakeClock())
    metrics.attach(FakeEngine(vocab_size=384))
    metrics.measured.step(step_stats(num_tokens=1, step_model=STEP_MODEL))
    families = text_string_to_metric_families(metrics.exposition("")[0].decode())
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families
        if not family.name.startswith("process_")
    }


def metric(cell: str) -> str:
    """A metric's name, without its labels."""
    return code(cell)[0].partition("{")[0]


def test_every_metric_is_documented_with_its_type() -> None:
    documented = {metric(row[0]): row[1] for row in table("serving.md", "Metric", "Type")}
    of_vllm = {metric(row[0]): documented[metric(row[1])] for row in rows_of_vllm() if row[2] == "yes"}
    assert documented | of_vllm == exported_metrics()


def rows_of_vllm() -> Rows:
    return table("from-vllm.md", "vLLM", "Flyball", "Under vLLM's name too")


def test_every_metric_of_the_operator_is_documented_with_its_type() -> None:
    exported = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric.type
        for metric in OperatorMetrics().registry.collect()
    }
    assert {code(row[0])[0]: row[1] for row in table("operations.md", "Metric", "Type")} == exported


def test_every_reason_of_ready_is_documented() -> None:
    documented = [code(row[0])[0] for row in table("operations.md", "Reason", "What it means", "What to do")]
    assert len(documented) == len(set(documented))
    assert {*diagnosis.ORDER} <= {*documented}
    modules = (diagnosis, status, reconciler)
    known = {word for module in modules for word in re.findall(r'"([A-Z]\w+)"', Path(module.__file__).read_text())}
    assert {*documented} <= known
    said = re.findall(
        r'(?:Condition\("Ready", [^,]+, |Problem\()"(\w+)"', "".join(Path(one.__file__).read_text() for one in modules)
    )
    assert {*said} <= {*documented}


def test_every_reason_to_hold_everything_is_documented() -> None:
    frozen = {str(reason) for reason, state in tuning_status._STATES.items() if state == "Frozen"}
    assert {code(row[0])[0] for row in table("operations.md", "Reason", "What to do")} == frozen


def error_classes(base: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    for one in base.__subclasses__():
        yield one
        yield from error_classes(one)


def test_every_error_class_is_documented_with_its_status() -> None:
    documented = {
        pair
        for statuses, codes, *_ in table("serving.md", "Status", "Code")
        for pair in zip(code(codes), map(int, statuses.split(", ")), strict=True)
    }
    raised = {(one.code, one.status) for one in error_classes() if one is not api_errors.HttpRefusal}
    assert len(raised) > 9
    assert raised <= documented


def test_every_limits_status_and_exit_code_is_documented() -> None:
    statuses = {code(row[0])[0]: int(row[1]) for row in table("serving.md", "Status", "HTTP")}
    assert statuses == {status.value: number for status, number in LIMITS_HTTP_STATUS.items()}
    exits = {int(row[0]) for row in table("serving.md", "Exit code")}
    assert exits == {value for name, value in vars(endpoints).items() if name.startswith("EXIT_")}


def test_the_flags_of_bounds_are_the_settings_and_their_defaults() -> None:
    bounds = runtime_cli.bounds_from(subcommand("flyball", "serve").parse_args(["model"]))
    assert ApiSettings(served_model_names=("test",), **bounds) == ApiSettings(served_model_names=("test",))
    changed = [word for name in sorted(bounds) for word in (f"--{name.removesuffix('_s').replace('_', '-')}", "7")]
    assert runtime_cli.bounds_from(subcommand("flyball", "serve").parse_args(["model", *changed])) == dict.fromkeys(
        bounds, 7
    )


def test_every_field_of_a_request_is_documented() -> None:
    documented = {field for row in table("serving.md", "Field") for field in code(row[0])}
    kinds = (ChatRequest, CompletionRequest, EmbeddingRequest)
    assert documented == {field for kind in kinds for field in kind.__struct_fields__}


def known_fields() -> set[str]:
    """Every field below spec, without former names."""
    fields = reference.fields(schema.schema()["properties"]["spec"])
    return {name for name, field in fields if not field.get("description", "").startswith("Former name")}


def flags_in(*cells: str) -> set[str]:
    return {word for cell in cells for word in code(cell) if word.startswith("--")}


def test_every_flag_field_and_limit_that_vllms_flags_become_exists() -> None:
    """A flag is the same on both sides or named in the second column; what extraArgs is to hold is not refused there."""
    options = {flag for one in subcommand("flyball", "serve")._actions for flag in one.option_strings}
    for theirs, ours, field, limit in table("from-vllm.md", "vLLM", "`flyball serve`", "Manifest", "Live limit"):
        mine = flags_in(theirs if ours.startswith("same") else "", ours)
        assert mine <= options, theirs
        fields = {word for word in code(field) if "." in word}
        assert fields <= known_fields(), theirs
        assert {*code(limit)} <= {*Limits.__struct_fields__}, theirs
        assert "runtime.extraArgs" not in fields or (mine and not mine & rules.MANAGED_FLAGS), theirs


def test_a_flag_of_vllm_without_a_counterpart_has_none() -> None:
    options = {flag for one in subcommand("flyball", "serve")._actions for flag in one.option_strings}
    rows = table("from-vllm.md", "vLLM", "Way out")
    assert not flags_in(*(theirs for theirs, _ in rows)) & options
    assert flags_in(*(way_out for _, way_out in rows)) <= options


def test_every_field_of_vllm_that_is_said_to_be_refused_is_refused() -> None:
    refused = {field for row in table("from-vllm.md", "Field", "") for field in code(row[0])}
    assert len(refused) > 7
    assert refused <= {*CHAT_NOOPS, *COMPLETION_NOOPS}


def test_the_metrics_of_vllm_are_mapped_to_those_that_exist() -> None:
    assert {metric(row[1]) for row in rows_of_vllm()} <= exported_metrics().keys()
    both = {metric(row[1]).removesuffix("_total"): metric(row[0]).removesuffix("_total") for row in rows_of_vllm()}
    assert VLLM_NAMES.items() <= both.items()


def test_the_images_of_the_readme_are_those_that_the_chart_and_the_operator_use() -> None:
    text = "".join(re.findall(r"```bash images\n(.*?)```", PAGES[0].read_text(), flags=re.DOTALL))
    expected = {f"flyball-operator:{version('flyball')}", names.runtime_image()}
    assert {*re.findall(r"\bflyball-\w+:[\w.-]+", text)} == expected
    for dockerfile, rest in re.findall(r"docker build -f (\S+) (.*)", text):
        declared = {*re.findall(r"^ARG (\w+)", (ROOT / dockerfile).read_text(), flags=re.MULTILINE)}
        assert {*re.findall(r"--build-arg (\w+)=", rest)} <= declared


def test_the_reference_is_what_the_crd_says() -> None:
    assert (DOCS / "reference" / "llmdeployment.md").read_text() == reference.markdown()


def test_every_field_that_local_mode_treats_differently_exists() -> None:
    named = {field for row in table("local-mode.md", "Field of spec", "Here") for field in code(row[0])}
    assert named <= known_fields()


def test_every_reason_of_a_decision_is_documented() -> None:
    documented = [code(row[0])[0] for row in table("tuning.md", "Reason")]
    assert sorted(documented) == sorted(Reason)


def test_the_outside_clients_are_documented_with_their_versions() -> None:
    documented = {f"{code(name)[0]}=={version}" for name, version, *_ in table("clients.md", "Client", "Version")}
    assert documented == {client.requirement.split()[0] for client in CLIENTS.values()}


def test_every_benchmark_script_is_documented() -> None:
    text = (DOCS / "benchmarking.md").read_text()
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*.sh")]
    missing = [script.name for script in scripts if f"`{script.name}`" not in text]
    assert not missing, f"docs/benchmarking.md does not say what these are for: {missing}"


def shell_lines(page: Path) -> Iterator[list[str]]:
    """The words of each command in the page's bash blocks; a leading VARIABLE=value is left out."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
        text = re.sub(r"^#.*\n", "", block, flags=re.MULTILINE).replace("\\\n", " ")
        lexer = shlex.shlex(text, posix=True, punctuation_chars="\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " ", True, ""
        for is_end, command in groupby(lexer, lambda word: set(word) == {"\n"}):
            if not is_end:
                yield list(dropwhile(re.compile(r"[A-Z_]+=").match, command))


def command_lines(*names: str) -> list[tuple[str, list[str]]]:
    return [(page.name, words) for page in PAGES for words in shell_lines(page) if words[0] in names]


def as_id(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)[:70]


@pytest.mark.parametrize(("page", "words"), command_lines(*PARSERS), ids=as_id)
def test_every_command_is_understood(page: str, words: list[str]) -> None:
    words = words[: words.index(">")] if ">" in words else words
    if words[:2] == ["flyball", "completion"]:
        flyball_cli.build_parser().parse_args(words[1:])
        return
    arguments = subcommand(*words[:2]).parse_args(words[2:])
    if words[:2] == ["flyball", "serve"]:
        runtime_cli.engine_config_from(arguments, Path(arguments.model))
    if words[:2] == ["flyball", "bench"]:
        clients_cli.settings_from(arguments)


def test_every_manifest_that_is_shown_is_accepted() -> None:
    texts = [text for page in PAGES for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL)]
    assert texts
    for text in texts:
        manifest.parse(text, source="docs", base=DOCS)


@pytest.mark.parametrize(("page", "words"), command_lines("python"), ids=as_id)
def test_every_script_is_there(page: str, words: list[str]) -> None:
    assert (ROOT / words[1]).is_file()


def routes() -> set[tuple[str, str]]:
    """Method and path of everything that both apps serve."""
    front, clock = FakeEngine(vocab_size=384), FakeClock()
    metrics = MetricsCollector(model_name="test", clock=clock)
    apps: list[FastAPI] = [
        create_app(front, make_tokenizer(), ApiSettings(served_model_names=("test",)), metrics),
        create_admin_app(front, metrics, "a-test-token"),
    ]
    return {(how, one.path) for app in apps for one in app.routes if isinstance(one, APIRoute) for how in one.methods}


@pytest.mark.parametrize(("page", "words"), command_lines("curl"), ids=as_id)
def test_every_curl_asks_for_what_is_served(page: str, words: list[str]) -> None:
    (url,) = (word for word in words if word.startswith("http://"))
    body = words[words.index("-d") + 1] if "-d" in words else None
    method = "POST" if body is not None or "POST" in words else "GET"
    path = urlsplit(url).path
    assert (method, path) in routes()
    kinds = {endpoints.ADMIN_LIMITS_PATH: LimitsUpdate, "/v1/chat/completions": ChatRequest}
    kinds["/v1/completions"] = CompletionRequest
    if body is not None:
        msgspec.json.decode(body, type=kinds.get(path, dict[str, Any]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_section_stands_twice_on_a_page(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#{1,3} .*", text, flags=re.MULTILINE)
    assert [one for one, times in Counter(headings).items() if times > 1] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text()
    named = [word for word in code(re.sub(r"```.*?```", "", text, flags=re.DOTALL)) if re.fullmatch(r"[\w./-]+", word)]
    paths = [word for word in named if "/" in word and re.search(r"\.(py|cpp|h|md|yaml|toml|sh)$|[a-z_]/$", word)]
    folders = [ROOT, *(ROOT / package for package in PACKAGES)]
    missing = [path for path in paths if not any((folder / path).exists() for folder in folders)]
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (page.parent / link).exists()]
    assert not missing + links


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub turns them into anchors."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_heading_that_is_linked_exists(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    missing = [
        f"{path}#{anchor}" for path, anchor in links if anchor not in anchors(page.parent / path if path else page)
    ]
    assert not missing


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda picture: picture.name)
def test_every_picture_can_be_shown_by_itself(picture: Path) -> None:
    """Well-formed, and without what a browser does not load or run for an image: scripts, links, foreign files."""
    for element in ElementTree.parse(picture).iter():
        assert element.tag.rpartition("}")[2] not in ("script", "image", "foreignObject", "a")
        links = [value for name, value in element.attrib.items() if name.endswith("href")]
        assert all(link.startswith("#") for link in links)  # to another part of the same picture
        assert "@import" not in (element.text or "") and "url(http" not in (element.text or "")


def test_the_table_of_models_has_every_architecture() -> None:
    named = re.findall(r"^\| `(\w+ForCausalLM)` \|", (ROOT / "docs/serving.md").read_text(), re.MULTILINE)
    assert tuple(named) == SUPPORTED_ARCHITECTURES


def test_what_the_pages_count_is_what_there_is() -> None:
    """In README and in the comparison with other servers."""
    readme, clients = PAGES[0].read_text(), (DOCS / "clients.md").read_text()
    num_metrics = sum(row[2] == "yes" for row in rows_of_vllm())
    assert re.findall(r"exports (\d+) of\s+\[vLLM's metrics\]", readme) == [str(num_metrics)]
    counted = re.findall(r"^\| Models \| (\d+) architectures", readme, re.MULTILINE)
    counted += re.findall(r"^\| Architectures \| (\d+),", clients, re.MULTILINE)
    assert counted == [str(len(SUPPORTED_ARCHITECTURES))] * 2
