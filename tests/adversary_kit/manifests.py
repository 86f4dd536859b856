"""Manifests that YAML reads as something odd, or that grow when they are read."""

HEAD = "apiVersion: flyball.dev/v1alpha1\nkind: LLMDeployment\n"
SPEC = "spec: {model: {uri: 'hf://a/b'}, accelerator: {count: 0}}\n"
NAMED = f"{HEAD}metadata: {{name: chat}}\n"


def with_label(scalar: str) -> str:
    """Return a manifest that is good but for the value of one label."""
    return f"{HEAD}metadata: {{name: chat, labels: {{made: {scalar}}}}}\n{SPEC}"


def alias_bomb(levels: int = 9, fold: int = 9, *, where: str = "x") -> str:
    """Return less than 1 kB that stands for ``fold ** levels`` texts."""
    lines = ["a0: &a0 lol"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * fold)}]" for n in range(1, levels + 1)]
    return NAMED + SPEC + "\n".join(lines) + f"\n{where}: *a{levels}\n"


def alias_bomb_in_spec(levels: int = 9, fold: int = 9) -> str:
    """Return a bomb in fields that are kept as they are given."""
    lines = ["    a0: &a0 {a: lol}"]
    for n in range(1, levels + 1):
        inner = ", ".join(f"k{i}: *a{n - 1}" for i in range(fold))
        lines.append(f"    a{n}: &a{n} {{{inner}}}")
    spec = "spec:\n  model: {uri: 'hf://a/b'}\n  accelerator: {count: 0}\n  podTemplate:\n"
    return NAMED + spec + "\n".join(lines) + "\n"


TAKEN: dict[str, str] = {
    "a date that is none": with_label("2024-13-45"),
    "a time that is none": with_label("2024-12-01T99:99:99Z"),
    "sixty to a high power": with_label("1" + ":59" * 3000),
    "an escaped escape code": with_label('"\\e[2J\\nFORGED"'),
    "a key that is a date": f"{HEAD}metadata: {{name: chat, 2024-01-01: a}}\n{SPEC}",
    "a key with a newline": f'{HEAD}metadata: {{name: chat, "a\\nFORGED\\e[2J": a}}\n{SPEC}',
}
"""Odd, and good manifests all the same: a label's text is a text."""

REFUSED: dict[str, str] = {
    "an integer of 5,000 digits": with_label("1" * 5000),
    "a hexadecimal integer of 5,000 digits": with_label("0x" + "f" * 5000),
    "an odd float": with_label("-.inf"),
    "binary that is none": with_label("!!binary '=='"),
    "a set": with_label("!!set {a, b}"),
    "pairs": with_label("!!pairs [a, b]"),
    "an integer that is none": with_label("!!int ''"),
    "a float that is none": with_label("!!float abc"),
    "a timestamp that is none": with_label("!!timestamp abc"),
    "a bool that is none": with_label("!!bool abc"),
    "a merge of nothing": f"{HEAD}metadata: {{<<: 1, name: chat}}\n{SPEC}",
    "an object": with_label("!!python/object/apply:os.system ['true']"),
    "100,000 brackets": NAMED + "spec: " + "[" * 100_000,
    "100,000 braces": NAMED + "spec: " + "{a: " * 100_000,
    "100,000 dashes": NAMED + "spec:\n" + "- " * 100_000,
    "a NUL": with_label("'a\0b'"),
    "an escape code": with_label("'\x1b[31m'"),
    "a key that is a list": f"{HEAD}metadata: {{name: chat}}\n? [a, b]\n: 1\n{SPEC}",
    "a long key": f"{HEAD}metadata: {{name: chat}}\nspec: {{model: {{uri: 'hf://a/b'}}, ? {'k' * 900_000} : 1}}\n",
    "an anchor to itself": NAMED + "spec: &a [*a]\n",
    "a model that is itself": NAMED + "spec: {model: &a {uri: 'hf://a/b', x: *a}, accelerator: {count: 0}}\n",
    "a pod that is itself": NAMED + "spec: {model: {uri: 'hf://a/b'}, podTemplate: &a {spec: *a}}\n",
    "an alias bomb": alias_bomb(),
    "an alias bomb in the model": NAMED + alias_bomb(where="spec").removeprefix(NAMED + SPEC),
    "an alias bomb in the pod": alias_bomb_in_spec(),
    "a huge number of replicas": NAMED + f"spec: {{model: {{uri: 'hf://a/b'}}, replicas: {10**30}}}\n",
    "replicas that are not finite": NAMED + "spec: {model: {uri: 'hf://a/b'}, replicas: .nan}\n",
    "a long name": f"{HEAD}metadata: {{name: {'n' * 500_000}}}\n{SPEC}",
    "a name that is forged": f'{HEAD}metadata: {{name: "a\\nFORGED\\e[2J"}}\n{SPEC}',
    "a kind that is forged": f'apiVersion: flyball.dev/v1alpha1\nkind: "a\\nFORGED\\e[2J"\nmetadata: {{name: chat}}\n{SPEC}',
    "a unit that overflows": NAMED
    + f"spec: {{model: {{uri: 'hf://a/b'}}, runtime: {{kvCacheMemory: {'9' * 400}Ei}}}}\n",
    "a text alone": "just a text\n",
    "nothing": "",
    "a directive": "%YAML 9.9\n---\na: 1\n",
    "an unfinished quote": NAMED + 'spec: "' + "a" * 100_000,
    "too many documents": "---\na: 1\n" * 20_000,
}
