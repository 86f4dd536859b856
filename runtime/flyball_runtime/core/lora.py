"""LoRA adapters: the settings at start-up, and what the processes tell each other of one."""

from dataclasses import dataclass

import msgspec
from msgspec import Struct

from flyball_protocol.quoting import one_line, quoted
from flyball_runtime.core.errors import ConfigError

MAX_LORA_RANK = 512
MAX_LORAS = 256
MAX_NAME_CHARS = 256


class LoraModule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to load at start-up.

    Attributes:
        name: what requests call it.
        path: folder with adapter_config.json and adapter_model.safetensors.
        base_model_name: shown as its parent in /v1/models; None shows the served model.
    """

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> "LoraModule":
        """Read ``NAME=PATH``, or a JSON object with the fields of this class. Raises ConfigError."""
        name, equals, path = text.partition("=")
        if text.startswith("{"):
            try:
                module = msgspec.json.decode(text, type=cls)
            except (msgspec.DecodeError, UnicodeEncodeError) as error:
                raise _unreadable(text, one_line(str(error))) from None
        elif equals:
            module = cls(name=name, path=path)
        else:
            raise _unreadable(text, "it has no =")
        if not module.name or not module.path:
            raise _unreadable(text, "name and path must not be empty")
        return module


def _unreadable(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"--lora-modules {quoted(text)} cannot be read: {why}. Write NAME=PATH, or a JSON object like "
        '{"name": "sql", "path": "/adapters/sql", "base_model_name": "my-model"}.'
    )


class Adapter(Struct, frozen=True, kw_only=True):
    """A loaded adapter.

    Attributes:
        number: tells it apart from all others that this engine has had, also those of the same name.
        parent: the model that /v1/models says it belongs to; None for the served one.
    """

    number: int
    name: str
    path: str
    parent: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of LoRA, under vLLM's names.

    Attributes:
        max_loras: most adapters among the sequences that run at once.
        max_lora_rank: highest rank of an adapter.
        max_cpu_loras: most adapters that are loaded at once; further ones are refused.
        modules: loaded at start-up.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int = 32
    modules: tuple[LoraModule, ...] = ()

    def __post_init__(self) -> None:
        for flag, value, most in (
            ("--max-loras", self.max_loras, MAX_LORAS),
            ("--max-lora-rank", self.max_lora_rank, MAX_LORA_RANK),
            ("--max-cpu-loras", self.max_cpu_loras, MAX_LORAS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{flag} is {quoted(value)}; it must be from 1 to {most}.")
        if self.max_cpu_loras < max(self.max_loras, len(self.modules)):
            raise ConfigError(
                f"--max-cpu-loras is {self.max_cpu_loras}, below --max-loras {self.max_loras} or the "
                f"{len(self.modules)} adapters of --lora-modules, all of which are kept in memory. Raise it."
            )
        names = [module.name for module in self.modules]
        for name in names:
            check_name(name)
            if names.count(name) > 1:
                raise ConfigError(f"--lora-modules has the name {quoted(name)} twice. Give each adapter its own.")

    @property
    def adapters(self) -> list[Adapter]:
        """Those that are loaded at start-up."""
        return [
            Adapter(number=number, name=one.name, path=one.path, parent=one.base_model_name)
            for number, one in enumerate(self.modules)
        ]


def check_name(name: str) -> None:
    """Raise ConfigError unless requests can use ``name`` for an adapter."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"the adapter's name is {quoted(name)}; it must have 1 to {MAX_NAME_CHARS} characters, all of them printable."
        )
