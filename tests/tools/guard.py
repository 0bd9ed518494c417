# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Finds the code of TRL that no longer runs once a trainer of this package replaces methods, and what is lost with it:
options that only this code reads, and errors that only this code raises.

All of it works on source texts, so that tests can change them.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pkgutil import resolve_name

import house

from trl_multimodal_rft.trainers.sampling.trainer import _LOG_METHODS
from trl_multimodal_rft.versions import OVERRIDDEN


# Overrides that call TRL's method for some inputs alone
_SCORES = {"_get_per_token_logps_and_entropies"}
IN_PART = {"GRPO": _SCORES, "PPO": _SCORES, "RLOO": _SCORES, "SFT": {"compute_loss"}, "Reward": {"_prepare_dataset"}}
# Methods of TRL that run, but on rows that stand in for the user's
ON_STAND_INS = {"DPO": {"_prepare_dataset"}, "KTO": {"_prepare_dataset"}, "SFT": {"_prepare_dataset"}}


def names(paths: Iterable[str]) -> set[str]:
    return {path.split(".")[-1] for path in paths}


def trl_of(trainer: type) -> type:
    return next(base for base in trainer.__mro__ if base.__module__.startswith("trl."))


@cache
def text_of(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def chain(node: ast.AST) -> str:
    """Returns the text of a name, of `super()`, or of attributes of these, such as `self.args`; else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = chain(node.value)
        return owner and f"{owner}.{node.attr}"
    is_super = isinstance(node, ast.Call) and chain(node.func) == "super" and not node.args
    return "super()" if is_super else ""


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Code:
    """Statements of a function or method `label` of a module of TRL or transformers."""

    label: str
    module: str
    nodes: tuple[ast.AST, ...]

    def walk(self) -> Iterator[ast.AST]:
        for node in self.nodes:
            yield from ast.walk(node)


@dataclass(eq=False)
class Upstream:
    """The sources of TRL and transformers. `changed` has other texts for some modules."""

    changed: dict[str, str] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module:
        return parsed(self.changed[module] if module in self.changed else text_of(module))

    @cache  # noqa: B019
    def definitions(self, module: str) -> dict[str, Function | ast.ClassDef]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return {node.name: node for node in self.tree(module).body if isinstance(node, kinds)}

    @cache  # noqa: B019
    def imported(self, module: str) -> dict[str, tuple[str, str]]:
        """Returns the names that a module imports from modules of TRL, with the module and the name there."""
        is_package = importlib.util.find_spec(module).submodule_search_locations is not None
        package = module if is_package else module.rpartition(".")[0]
        found = {}
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.ImportFrom):
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if source.split(".")[0] == "trl":
                    found |= {each.asname or each.name: (source, each.name) for each in node.names}
        return found

    @cache  # noqa: B019
    def resolve(self, module: str, name: str) -> tuple[str, Function | ast.ClassDef] | None:
        """Returns the function or class of TRL that a name in a module of TRL stands for, with its module."""
        if not module.startswith("trl."):
            return None
        if name in self.definitions(module):
            return module, self.definitions(module)[name]
        if name not in self.imported(module):
            return None
        source, original = self.imported(module)[name]
        home = getattr(getattr(importlib.import_module(source), original, None), "__module__", source)
        known = self.definitions(home) if home.startswith("trl") else {}
        return (home, known[original]) if original in known else None

    def methods(self, of: type) -> dict[str, list[Code]]:
        """Returns the methods of TRL's class `of`: each definition, and after it those that it calls by `super()`."""
        found: dict[str, list[Code]] = {}
        is_open: dict[str, bool] = {}
        for base in of.__mro__:
            if base.__module__.split(".")[0] not in ("trl", "transformers"):
                continue
            node = self.definitions(base.__module__)[base.__name__]
            for each in node.body:
                if isinstance(each, Function) and is_open.get(each.name, True):
                    code = Code(each.name, base.__module__, (each,))
                    found.setdefault(each.name, []).append(code)
                    is_open[each.name] = f"super().{each.name}(" in ast.unparse(each)
        return found


INSTALLED = Upstream()


# Branches


def value_of(test: ast.expr, facts: dict[str, bool]) -> bool | None:
    """Returns the value of a condition given the values of others, by their texts; `None` if it isn't known."""
    known = facts.get(ast.unparse(test))
    if known is not None:
        return known
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = value_of(test.operand, facts)
        return None if value is None else not value
    if isinstance(test, ast.BoolOp):
        decisive = isinstance(test.op, ast.Or)
        values = [value_of(each, facts) for each in test.values]
        if decisive in values:
            return decisive
        return None if None in values else not decisive
    return None


def split_by_facts(statements: list[ast.stmt], facts: dict[str, bool]) -> tuple[list[ast.AST], list[ast.AST]]:
    """Returns the parts of statements that run, and those that don't."""
    live: list[ast.AST] = []
    dead: list[ast.AST] = []
    for node in statements:
        blocks = [name for name in ("body", "orelse", "finalbody", "handlers") if getattr(node, name, None)]
        if isinstance(node, Function | ast.ClassDef) or not blocks:
            live.append(node)
            continue
        value = value_of(node.test, facts) if isinstance(node, ast.If) else None
        for name in ("test", "iter", "items", "subject"):
            head = getattr(node, name, None)
            live += head if isinstance(head, list) else [head] if isinstance(head, ast.AST) else []
        for name in blocks:
            if value is not None and name == ("orelse" if value else "body"):
                dead += getattr(node, name)
                continue
            block = (
                [each for part in getattr(node, name) for each in getattr(part, "body", [part])]
                if (name == "handlers")
                else getattr(node, name)
            )
            lives, dies = split_by_facts(block, facts)
            live += lives
            dead += dies
    return live, dead


# What TRL's constructors find here in any case, as conditions in them and their values
_LOADED = {"isinstance(model, str)": False, "processing_class is None": False, "args is None": False}
_SAMPLING = {**_LOADED, "self.use_vllm": False}
_WITHOUT_TOOLS = {"tools": False, "self.tools": False}
_GRPO = {
    **_SAMPLING,
    **_WITHOUT_TOOLS,
    "train_dataset is None": False,
    "environment_factory": False,
    "environment_factory is None": True,
    "environment_factory is not None": False,
    "self.environment_factories is not None": False,
    "rollout_func is not None": False,
}
_READING = {**_LOADED, "data_collator is None": False}
_TAKES_MEDIA = {"self._is_vision_dataset and (not self._is_vlm)": False}
_PREFERENCE = {**_READING, **_TAKES_MEDIA, "args.precompute_ref_log_probs": False}
FACTS = {
    "GRPO": _GRPO,
    "PPO": _GRPO,
    "RLOO": {**_SAMPLING, "train_dataset is None": False},
    "Distillation": {**_SAMPLING, **_WITHOUT_TOOLS, "teacher_model is not None": False},
    "SFT": {
        **_READING,
        **_TAKES_MEDIA,
        "args.packing": False,
        "args.assistant_only_loss": False,
        "self._skip_prepare_dataset": True,
        "self.padding_free": False,
        "args.padding_free": False,
    },
    "DPO": {**_PREFERENCE, "args.max_length is not None": False, "self.padding_free": False},
    "KTO": {**_PREFERENCE, "self.precompute_ref_logps": False},
    "Reward": _READING,
}


# What replaced code is


@cache
def own_source(trainer: type) -> str:
    return "".join(inspect.getsource(base) for base in trainer.__mro__ if house.is_own(base))


@dataclass(frozen=True)
class Replaced:
    """The code of TRL that a trainer replaces."""

    upstream: Upstream
    name: str  # of the trainer's method, such as "GRPO"

    @cached_property
    def trainer(self) -> type:
        return house.trainers()[self.name]

    @cached_property
    def methods(self) -> dict[str, list[Code]]:
        return self.upstream.methods(trl_of(self.trainer))

    @cached_property
    def overridden(self) -> set[str]:
        """Returns the methods of which none of TRL's code runs, or not on all rows."""
        source = own_source(self.trainer)
        in_part = IN_PART.get(self.name, set())
        return {name for name in names(OVERRIDDEN[self.name]) if name in in_part or f"super().{name}(" not in source}

    @cached_property
    def called(self) -> dict[str, set[str]]:
        """Returns for each method of TRL the names that its code reads as `self.name`."""
        return {
            name: {
                node.attr
                for code in codes
                for node in code.walk()
                if isinstance(node, ast.Attribute) and chain(node.value) == "self"
            }
            for name, codes in self.methods.items()
        }

    @cached_property
    def replaced(self) -> set[str]:
        return self.overridden | IN_PART.get(self.name, set()) | ON_STAND_INS.get(self.name, set())

    @cached_property
    def lost(self) -> set[str]:
        """Returns the replaced methods, and the methods that these call, unless this package calls them, too."""
        found = {*self.replaced}
        kept = own_calls(self.trainer)
        waiting = [*found]
        while waiting:
            for each in self.called.get(waiting.pop(), set()) & self.methods.keys() - found - kept:
                found.add(each)
                waiting.append(each)
        return found

    @cached_property
    def gone(self) -> set[str]:
        """Returns the lost methods, without those that other methods call, too."""
        found = {*self.lost}
        while True:
            running = [self.called[name] for name in self.methods.keys() - found - {"__init__"}]
            returned = (found - self.replaced) & set().union(self._calls_of_constructor, *running)
            if not returned:
                return found
            found -= returned

    @cached_property
    def _constructor(self) -> tuple[list[ast.AST], list[ast.AST]]:
        (function,) = self.methods["__init__"][0].nodes
        return split_by_facts(function.body, FACTS[self.name])

    @cached_property
    def _calls_of_constructor(self) -> set[str]:
        live, _ = self._constructor
        nodes = [each for node in live for each in ast.walk(node) if isinstance(each, ast.Attribute)]
        return {node.attr for node in nodes if chain(node.value) == "self"}

    @cached_property
    def options_by_attribute(self) -> dict[str, set[str]]:
        """Returns the options that TRL's constructor reads for the value of an attribute."""
        found: dict[str, set[str]] = {}
        for node in self.methods["__init__"][0].walk():
            targets = map(chain, node.targets) if isinstance(node, ast.Assign) else ()
            for target in targets:
                code = Code("__init__", "", (node.value,))
                options = reads(self.upstream, code, _CONFIGS) if target.startswith("self.") else set()
                if options:
                    found.setdefault(target.removeprefix("self."), set()).update(options)
        return found

    def code_of(self, methods: set[str]) -> list[Code]:
        """Returns the code of methods, and of branches of the constructor that never run."""
        constructor = self.methods["__init__"][0]
        branches = Code("__init__", constructor.module, tuple(self._constructor[1]))
        return [branches, *(code for name in sorted(methods) for code in self.methods.get(name, []))]

    @cached_property
    def running(self) -> list[Code]:
        """Returns the code of methods that run, and of the constructor without branches that never run."""
        constructor, *rest = self.methods["__init__"]
        branches = Code("__init__", constructor.module, tuple(self._constructor[0]))
        left = self.methods.keys() - self.gone - {"__init__"}
        return [branches, *rest, *(code for name in sorted(left) for code in self.methods[name])]


# Names that code reads


_CONFIGS = ("args", "self.args")


def reads(upstream: Upstream, code: Code, owners: Iterable[str] = ("self", *_CONFIGS)) -> set[str]:
    """
    Returns the names `x` that code reads as `owner.x` or `getattr(owner, "x")`, also in functions of TRL that get an
    owner whole.
    """
    return _reads(upstream, code, frozenset(owners), set())


def _reads(upstream: Upstream, code: Code, owners: frozenset[str], seen: set) -> set[str]:
    nodes = list(code.walk())
    for node in nodes:
        if isinstance(node, ast.Assign) and chain(node.value) in owners:
            owners |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found |= {node.attr} if chain(node.value) in owners else set()
        elif isinstance(node, ast.Call):
            found |= _read_by_name(node, owners)
            found |= _read_in_called(upstream, code.module, node, owners, seen)
    return found


def _read_by_name(call: ast.Call, owners: Iterable[str], loops: dict[str, set[str]] | None = None) -> set[str]:
    """
    Returns the name in `getattr(owner, "name")`, if a call is that. `loops` has the values of variables in place of a
    name.
    """
    if chain(call.func) != "getattr" or chain(call.args[0]) not in owners:
        return set()
    name = call.args[1]
    return {name.value} if isinstance(name, ast.Constant) else (loops or {}).get(ast.unparse(name), set())


def _values_of_loops(tree: ast.AST) -> dict[str, set[str]]:
    """Returns the texts that variables take, in loops over texts that stand there."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Tuple | ast.List):
            texts = {each.value for each in node.iter.elts if isinstance(each, ast.Constant)}
            found.setdefault(ast.unparse(node.target), set()).update(texts)
    return found


def _read_in_called(upstream: Upstream, module: str, call: ast.Call, owners: frozenset[str], seen: set) -> set[str]:
    """Returns what a called function of TRL, or the constructor of a class of TRL, reads of the owners it gets."""
    resolved = upstream.resolve(module, call.func.id) if isinstance(call.func, ast.Name) else None
    if resolved is None:
        return set()
    home, function = resolved
    if isinstance(function, ast.ClassDef):
        function = next((each for each in function.body if getattr(each, "name", "") == "__init__"), None)
        if function is None:
            return set()
    positions = [each.arg for each in (*function.args.posonlyargs, *function.args.args) if each.arg != "self"]
    passed = [*zip(positions, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
    within = set()
    for name, value in passed:
        text = chain(value)
        if name and text in owners:
            within |= {name, f"{name}.args"} if text == "self" else {name}
    key = home, function.name, frozenset(within)
    if not within or key in seen:
        return set()
    seen.add(key)
    return _reads(upstream, Code(function.name, home, tuple(function.body)), frozenset(within), seen)


# Names that this package reads


# Tables of options, each with the prefix of its options' names, that code reads or sets by `getattr` and `setattr`
TABLES = {
    "trainers.sampling.engine:_ENGINE_OPTIONS": "vllm_",
    "trainers.sampling.engine:_SAMPLING_OPTIONS": "",
    "trainers.base.config_options:SPEED_OPTIONS": "",
    "trainers.base.config_options:UNUSED_IN_READING": "",
    "trainers.base.config_options:UNUSED_IN_SAMPLING": "",
    "trainers.supervised.config:_UNUSED_OPTIONS": "",
    "trainers.preference.dpo_config:_UNUSED_OPTIONS": "",
    "trainers.preference.kto_config:_UNUSED_OPTIONS": "",
    "trainers.preference.reward_config:_UNUSED_OPTIONS": "",
}


@cache
def imported_by(module: str) -> set[str]:
    known = house.modules()
    outside = tuple(f"{house.PACKAGE.name}.{name}" for name in ("extras", "lightrft"))
    return {name for name in house.imports(known[module], known) if not name.startswith(outside)}


@cache
def modules_below(module: str) -> frozenset[str]:
    """Returns a module of the package and those that it imports, at any depth, but for what no training needs."""
    reached = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= imported_by(name) - reached
    return frozenset(reached)


def _is_config(owner: str, module: str) -> bool:
    """Returns whether a name stands for a trainer's config; outside of the trainers, `config` is a model's."""
    in_trainers = module.startswith(f"{house.PACKAGE.name}.trainers.")
    return owner == "args" or owner.endswith((".args", "._args")) or (owner == "config" and in_trainers)


@cache
def options_read_in(module: str) -> frozenset[str]:
    """Returns the names that a module reads of a config, or that stand in its tables of options."""
    tree = house.tree_of(house.modules()[module])
    loops = _values_of_loops(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found |= {node.attr} if _is_config(chain(node.value), module) else set()
        elif isinstance(node, ast.Call) and chain(node.func) == "getattr":
            owner = chain(node.args[0])
            found |= _read_by_name(node, {owner} if _is_config(owner, module) else (), loops)
    short = module.removeprefix(f"{house.PACKAGE.name}.")
    for path, prefix in TABLES.items():
        if path.startswith(f"{short}:"):
            found |= {prefix + name for name in resolve_name(f"{house.PACKAGE.name}.{path}")}
    return frozenset(found)


@cache
def _read_of_self(of: type) -> frozenset[str]:
    """
    Returns the names `x` that the package's classes of a trainer or config read as `self.x` or `super().x`, or keep
    elsewhere by `attribute_of`.
    """
    found = set()
    for base in filter(house.is_own, of.__mro__):
        tree = house.tree_of(house.modules()[base.__module__])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                found |= _read_in_class(node)
    return frozenset(found)


def _read_in_class(tree: ast.ClassDef) -> set[str]:
    loops = _values_of_loops(tree)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found |= {node.attr} if chain(node.value) in ("self", "super()") else set()
        elif isinstance(node, ast.Call) and chain(node.func) == "getattr":
            found |= _read_by_name(node, {"self"}, loops)
        elif isinstance(node, ast.Assign) and chain(getattr(node.value, "func", node)) == "attribute_of":
            found |= {ast.unparse(target) for target in node.targets}
    return found


def own_calls(trainer: type) -> frozenset[str]:
    """Returns the methods of TRL that the package's classes of a trainer call."""
    return _read_of_self(trainer) | frozenset(_LOG_METHODS.values())


@cache
def own_reads(name: str) -> frozenset[str]:
    """Returns the names that the package reads of a trainer and of its config."""
    trainer = house.trainers()[name]
    config = house.exported("Config")[name]
    below = modules_below(trainer.__module__) | modules_below(config.__module__)
    return _read_of_self(trainer) | _read_of_self(config) | frozenset().union(*map(options_read_in, below))


def unread(replaced: Replaced) -> dict[str, str]:
    """
    Returns names that replaced code of TRL reads and this package doesn't, each with a method that reads it. The
    attributes that TRL's constructor makes of options stand for these options.
    """
    read = own_reads(replaced.name) | replaced.methods.keys() | {"args"}
    options = replaced.options_by_attribute
    found = {}
    for code in replaced.code_of(replaced.lost):
        for name in reads(replaced.upstream, code) - read:
            if not name.startswith("__"):
                found |= dict.fromkeys(options.get(name, {name}) - read, code.label)
    return found


# Private names of TRL and transformers


def assigned(upstream: Upstream, of: type) -> set[str]:
    """Returns the attributes that TRL's and transformers' classes of a trainer assign, or have from the start."""
    found = set()
    for base in of.__mro__:
        if base.__module__.split(".")[0] not in ("trl", "transformers"):
            continue
        node = upstream.definitions(base.__module__)[base.__name__]
        found |= {chain(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
        found |= {chain(target) for each in node.body if isinstance(each, ast.Assign) for target in each.targets}
        found |= {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and chain(each.value) == "self"
        }
    return found


def private_names(upstream: Upstream, name: str) -> tuple[set[str], set[str]]:
    """Returns the private attributes and the private methods of TRL and transformers that a trainer here uses."""
    trainer = house.trainers()[name]
    trl = trl_of(trainer)
    own = [house.tree_of(house.modules()[base.__module__]) for base in trainer.__mro__ if house.is_own(base)]
    stored = {chain(each) for tree in own for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    stored = {text.removeprefix("self.") for text in stored if text.startswith("self.")}
    used = {each for each in own_calls(trainer) | stored if re.match("_(?!_)", each) and "." not in each}
    methods = upstream.methods(trl).keys()
    return used & assigned(upstream, trl) - methods, used & methods


def private_imports() -> set[str]:
    """Returns the private functions and classes that the package imports of TRL and transformers, as `module:name`."""
    return {
        f"{node.module}:{each.name}"
        for path in house.modules().values()
        for node in ast.walk(house.tree_of(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("trl", "transformers")
        for each in node.names
        if each.name.startswith("_") and not node.level
    }


# Errors that replaced code raises


def helpers(upstream: Upstream, code: list[Code]) -> dict[tuple[str, str], Code]:
    """Returns the functions and classes of TRL that code names, at any depth, by their modules and names."""
    found: dict[tuple[str, str], Code] = {}
    waiting = [*code]
    while waiting:
        each = waiting.pop()
        for node in each.walk():
            resolved = upstream.resolve(each.module, node.id) if isinstance(node, ast.Name) else None
            if resolved is not None and (resolved[0], resolved[1].name) not in found:
                home, definition = resolved
                found[home, definition.name] = Code(definition.name, home, tuple(definition.body))
                waiting.append(found[home, definition.name])
    return found


@cache
def taken_from_trl() -> dict[tuple[str, str], Code]:
    """Returns the functions and classes of TRL that this package takes, and those that they name, at any depth."""
    found = {}
    for path in house.modules().values():
        for node in ast.walk(house.tree_of(path)):
            if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] != "trl":
                continue
            for each in node.names:
                home = getattr(getattr(importlib.import_module(node.module), each.name, None), "__module__", "")
                known = INSTALLED.definitions(home) if home.startswith("trl.") else {}
                if each.name in known and not each.name.endswith("Trainer"):
                    found[home, each.name] = Code(each.name, home, tuple(known[each.name].body))
    return found | helpers(INSTALLED, [*found.values()])


def errors(replaced: Replaced) -> set[tuple[str, str]]:
    """
    Returns the errors that only replaced code of TRL raises, each as the function that raises it, such as
    `grpo_trainer._compute_loss`, and the texts of its message, joined by `{}`. An error that is raised again has none.
    """
    code = replaced.code_of(replaced.gone)
    kept = helpers(replaced.upstream, replaced.running).keys() | taken_from_trl().keys()
    code += [each for key, each in helpers(replaced.upstream, code).items() if key not in kept]
    return {
        (f"{each.module.rpartition('.')[2]}.{each.label}", message_of(node))
        for each in code
        for node in each.walk()
        if isinstance(node, ast.Raise) and node.exc is not None
    }


def message_of(node: ast.Raise) -> str:
    """Returns the message of an error, with `{}` in place of values."""
    texts = []
    for part in getattr(node.exc, "args", ())[:1]:
        for each in part.values if isinstance(part, ast.JoinedStr) else [part]:
            texts.append(str(each.value) if isinstance(each, ast.Constant) else "{}")
    return "".join(texts)


@cache
def texts_in(path: str) -> list[str]:
    """Returns the texts in a file of the package, also the parts of texts with values."""
    nodes = ast.walk(house.tree_of(house.PACKAGE / path))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
