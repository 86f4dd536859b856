"""The settings of LoRA adapters, and the flags that they come from."""

from pathlib import Path
from typing import Any

import pytest

from flyball_runtime.cli import build_parser, lora_from, runtime_lora_dir_from
from flyball_runtime.core.errors import ConfigError
from flyball_runtime.core.lora import LoraConfig, LoraModule
from flyball_runtime.model import hub


def parsed(*flags: str) -> LoraConfig | None:
    return lora_from(build_parser().parse_args(["serve", "my-model", *flags]))


def test_adapters_are_named_as_for_vllm() -> None:
    both = parsed("--enable-lora", "--lora-modules", "a=/x=y", '{"name": "b", "path": "z", "base_model_name": "m"}')
    assert both is not None
    modules = (LoraModule(name="a", path="/x=y"), LoraModule(name="b", path="z", base_model_name="m"))
    assert both == LoraConfig(modules=modules)
    assert [(one.number, one.name, one.parent) for one in both.adapters] == [(0, "a", None), (1, "b", "m")]
    assert parsed() is None
    assert parsed("--enable-lora", "--max-loras", "4", "--max-lora-rank", "64") == LoraConfig(
        max_loras=4, max_lora_rank=64
    )


def test_an_adapter_may_be_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "resolve_model_path", lambda name: tmp_path / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "sql").mkdir(parents=True)
    config = parsed("--enable-lora", "--lora-modules", "a=owner/sql", "b=here/sql", "c=./x", "d=/x/y", "e=~/x", "f=x")
    assert config is not None
    paths = [module.path for module in config.modules]
    assert paths == [str(tmp_path / "owner/sql"), "here/sql", "x", "/x/y", str(Path.home() / "x"), "x"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--lora-modules", "a=b"], "--lora-modules is given without --enable-lora"),
        (["--runtime-lora-dir", "."], "--runtime-lora-dir is given without --enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "'a' cannot be read: it has no ="),
        (["--enable-lora", "--lora-modules", "=b"], "name and path must not be empty"),
        (["--enable-lora", "--lora-modules", "{"], "cannot be read"),
        (["--enable-lora", "--lora-modules", '{"name": "a"}'], "missing required field `path`"),
        (["--enable-lora", "--lora-modules", '{"name": "a", "path": "b", "rank": 1}'], "unknown field `rank`"),
        (["--enable-lora", "--lora-modules", "a=b", "a=c"], "has the name 'a' twice"),
        (["--enable-lora", "--lora-modules", "my-model=b"], "'my-model', which is the served model"),
        (["--enable-lora", "--lora-modules", "a\n=b"], "printable"),
        (["--enable-lora", "--max-loras", "0"], "--max-loras is 0; it must be from 1 to 256"),
        (["--enable-lora", "--max-lora-rank", "513"], "--max-lora-rank is 513; it must be from 1 to 512"),
        (["--enable-lora", "--max-cpu-loras", "3", "--max-loras", "4"], "--max-cpu-loras is 3, below --max-loras 4"),
    ],
)
def test_wrong_flags_end_the_start(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        parsed(*flags)
    assert len(str(refused.value)) < 500


def test_the_folder_of_adapters_must_be_there(tmp_path: Path) -> None:
    def folder(*flags: Any) -> Path | None:
        return runtime_lora_dir_from(build_parser().parse_args(["serve", "m", *map(str, flags)]))

    (tmp_path / "link").symlink_to(tmp_path)
    assert folder() is None
    assert folder("--runtime-lora-dir", tmp_path / "link") == tmp_path.resolve()
    with pytest.raises(ConfigError, match="which is not a folder"):
        folder("--runtime-lora-dir", tmp_path / "nowhere")
