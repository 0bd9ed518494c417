# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Removal of passwords, tokens and keys from everything that a run writes or prints."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any


# A URL within a text. Quotes can be part of the URL.
_URL = re.compile(
    r"(?<![\w.+:/-])(?:(?:[A-Za-z][\w.+-]*:)?//|data:(?!;base64,')(?=[\w/.+-]*[;,]))"
    r"(?:[^\s'\"<>]|['\"<>](?=[\w%&=+/@:-]))*"
)
# `user:password@` at the start of a word or after a slash or quote, also in a URL with one slash:
# `http:/user:password@host`. A password may contain `@`.
_LOGIN = re.compile(r"(?<![^/'\"\s])[^\s'\"/:@]*:[^\s'\"/]*@(?=[\w\[])")
# A user, with or without a password, or a password alone, after `://`. Digits and a slash after the colon are a port
# and a path, not a password, and brackets hold an address. `@` may be percent-encoded behind a password.
_LOGIN_OF_URL = re.compile(
    r"(?<=://)(?!\[)(?:[^\s'\"/:@]*:(?!\d+[/?#])(?:(?!://)[^\s'\"<>])*(?:@|%40)|[^\s'\"/:@]+@)(?=[\w\[])"
)
_CODE = re.compile(r"(?<=[?&]code=)[^\s'\"<>&#]+")  # a key in the query of a URL

# Tokens in the formats of their issuers, such as `hf_...`, and values of the header `Authorization`
_TOKEN = re.compile(
    r"\b(hf|api_org|sk|gh[oprsu]|github_pat|glpat|gsk|nvapi|xai|xox[abeprs])([_-])\w[\w-]{14,}|\b(AKIA|ASIA)[A-Z0-9]{12,}"
    r"|\b(AIza)[\w-]{20,}|\b(eyJ)[\w-]+\.[\w-]+\.[\w-]*"
)
_HEADER = re.compile(r"(?i)\b(bearer|basic) +(?!auth|realm)[\w.~+/=-]+")
# Headers whose values have several words, up to the end of the line
_WHOLE_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie): *[^\s'\"][^\r\n'\"}\]]*")
# A name and its value: `name=value`, `name: value` or `"name": "value"`; and below, `--name value`. A bare
# value after ` = ` isn't an expression of code.
_ASSIGNMENT = re.compile(
    r"""(?<![\w-])-{0,2}(?P<name>[A-Za-z][\w-]*)"""
    r"""(?P<sign>["'] *[:=] *|=(?! )|: +| *= *(?=[rbu]?["']|[^\s.(\[]+(?:[\s,;)}]|\Z)))"""
    r"""(?P<value>[rbu]{0,2}(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|[^\s,;&()"'\]}]+)""",
    re.IGNORECASE,
)
# In prose, a word or a count may follow these words and a colon: "no token: its row is empty"
_PROSE_NAMES = {"token", "key", "pass", "auth", "signature"}
_PROSE_VALUE = re.compile(r"[a-z]+|\d{1,7}")
_OPTION = re.compile(r"(?<![\w-])--(?P<name>[A-Za-z][\w-]*)(?P<sign> +)(?P<value>(?!--)\S+)")

Setting = str | float | Sequence | Mapping | None  # a value of YAML and JSON

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
# Words that make a name secret, regardless of its other words
_SECRET_WORDS = set(
    "secret secrets password passwords passwd passphrase pwd pw credential credentials authorization auth".split()
)
_SECRET_WORDS |= set("apikey bearer cookie cookies signature sig jwt sas dsn".split())
# Words that precede `key` in names of secrets, and `token` or `pass` in names of one word, such as `apitoken`
_KEY_WORDS = set(
    "api access secret private account ssh service subscription encryption signing openai wandb hf auth master hmac "
    "functions function shared storage session client consumer app admin root user db database hub license deploy "
    "anthropic azure gemini google mistral github gitlab slack bot refresh".split()
)
_ONE_WORD = re.compile(rf"({'|'.join(sorted(_KEY_WORDS))})(key|token|pass|secret|password)")
# Words that precede `token` in names that aren't secrets, such as `eos_token`
_TOKENIZER_WORDS = set(
    "pad eos bos unk sep cls mask image video audio vision boi eoi boa eoa start end stop media".split()
)
_TOKENIZER_WORDS |= {"special", "placeholder", "first", "last", "per", "each", "next"}


def is_secret(name: str, *, is_variable: bool = False) -> bool:
    """
    Returns whether the name of an option, argument, header or key, in any spelling (`"hf_token"`, `"apiKey"`), names a
    secret. In names of environment variables (`is_variable`), `key` and `token` always do.
    """
    words = [*chain.from_iterable(_parts(word.lower()) for word in _WORD.findall(name))]
    if {*words} & _SECRET_WORDS or is_variable and {"key", "token"} & {*words}:
        return True
    words = words[:-1] if words[-1:] == ["id"] and "key" in words else words  # as in `access_key_id`
    if words[-2:] in (["connection", "string"], ["connection", "strings"]):
        return True
    before = words[-2] if len(words) > 1 else ""
    last = words[-1] if words else ""
    return (last == "token" and before not in _TOKENIZER_WORDS) or (
        last in ("key", "pass") and (not before or before in _KEY_WORDS) or last == "keys" and before in _KEY_WORDS
    )


def _parts(word: str) -> list[str]:
    """Returns the two words of a name such as `apitoken` or `secretkeys`, or the word alone."""
    match = _ONE_WORD.fullmatch(word.removesuffix("s"))
    return [match[1], match[2]] if match else [word]


class Secret(str):
    """
    A text that shows as `***`, or as `shown`, wherever it is printed, logged, pickled or serialized. Copies within the
    process keep it.
    """

    def __new__(cls, text: str, shown: str = "***"):
        return super().__new__(cls, shown)

    def __init__(self, text: str, shown: str = "***"):
        self._text = text

    def reveal(self) -> str:
        """Returns the text, for the call that needs it."""
        return self._text

    def __reduce__(self):
        return str, (str(self),)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self


def secured(value: Any, name: str = "") -> Any:
    """
    Returns the value of an option with a [`Secret`] in place of each text whose name in a dictionary is that of a
    secret, and of each text with a password in a URL. Other values stay the same objects.
    """
    if isinstance(value, Secret):
        return value
    if isinstance(value, str) and not value.lstrip().startswith("{"):  # JSON, whose entries are set once it is read
        shown = "***" if is_secret(name) else masked(value)
        return value if shown == value else Secret(value, shown)
    if isinstance(value, dict):
        entries = {key: secured(entry, str(key)) for key, entry in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    return value


def revealed(value: Any) -> Any:
    """Returns the value of an option with the texts that [`Secret`]s stand for. Other values stay the same objects."""
    if isinstance(value, Secret):
        return value.reveal()
    if isinstance(value, dict):
        entries = {key: revealed(entry) for key, entry in value.items()}
        return value if all(entries[key] is value[key] for key in value) else entries
    return value


def masked(text: str) -> str:
    """
    Returns a text with `***` in place of: the user and password of a URL; tokens; values of headers with credentials;
    and values after names of secrets. For example, `--api-key=abc` becomes `--api-key=***`. The rest of a URL's query
    stays, so that links still work.
    """
    text = _CODE.sub("***", _LOGIN.sub("***@", _LOGIN_OF_URL.sub("***@", text)))
    text = _WHOLE_HEADER.sub(r"\1: ***", _HEADER.sub(r"\1 ***", text))

    def mask(match: re.Match[str]) -> str:
        value = match["value"]
        quote = value[-1] if value[-1] in "\"'" else ""
        is_prose = match["name"].lower() in _PROSE_NAMES and match["sign"][0] == ":" and _PROSE_VALUE.fullmatch(value)
        if is_prose or not is_secret(match["name"]):
            return match[0]
        return f"{match[0][: -len(value)]}{quote}***{quote}"

    text = _OPTION.sub(mask, _ASSIGNMENT.sub(mask, text))
    return _TOKEN.sub(lambda match: f"{match[1] or match[3] or match[4] or match[5]}{match[2] or ''}***", text)


def masked_words(words: Sequence[str]) -> list[str]:
    """Masks the words of a command line. The word after an option with the name of a secret becomes `***`."""
    result = list(map(masked, words))
    for i, (option, word) in enumerate(zip(words, words[1:], strict=False)):
        is_login = option == "-u" and ":" in word  # as of curl
        if (
            option.startswith("-")
            and "=" not in option
            and is_secret(option)
            and not word.startswith("--")
            or is_login
        ):
            result[i + 1] = "***"
    return result


def without_secrets(value: Setting, *, is_environment: bool = False) -> Setting:
    """
    Converts a value to types of YAML and JSON, and removes secrets. Entries whose keys name a secret are dropped, also
    from a JSON dictionary in a text. Other texts are [`masked`]. With `is_environment`, keys are names of environment
    variables.
    """
    value = getattr(value, "value", value)  # the value of an enumeration's member
    if isinstance(value, str):
        with suppress(ValueError):  # raised by a text that isn't JSON
            if value.startswith("{"):
                parsed = json.loads(value)
                cleaned = without_secrets(parsed)
                return value if cleaned == parsed else json.dumps(cleaned)
        return masked(value)
    if isinstance(value, (list, tuple)):
        is_command = all(isinstance(word, str) for word in value) and any(word.startswith("--") for word in value)
        return masked_words(value) if is_command else [without_secrets(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value if value is None or isinstance(value, (bool, int, float)) else masked(str(value))
    return {
        str(name): without_secrets(entry, is_environment=name == "env")
        for name, entry in value.items()
        if not is_secret(str(name), is_variable=is_environment)
        # Under these names, a text is a secret, and a number is a count
        and not (isinstance(entry, str) and name in ("tokens", "keys"))
    }


def without_credentials(text: str) -> str:
    """Returns a [`masked`] text, also without user information and queries in URLs. Queries can hold signatures."""
    text = _URL.sub(lambda match: masked_url(match[0]), text)
    return masked(re.sub(r"\?[^\s'\"<>?=]*=[^\s'\"<>]*", "?***", _LOGIN.sub("***@", text)))


def masked_url(url: str) -> str:
    """
    Masks user information, query and fragment of a URL, also where `?`, `#` or `@` is percent-encoded, and the data of
    `data:` URLs. For example, `https://me:pw@host/a.wav?key=1` becomes `https://***@host/a.wav?***`.
    """
    if url[:5].lower() == "data:":
        return f"{re.split('[;,]', url, maxsplit=1)[0]};***"
    if "://" not in url and not url.startswith("//"):
        return _LOGIN.sub("***@", url)
    # `mark` is the first `?` or `#`, also percent-encoded, and `query` is the text after it
    address, mark, query = (*re.split(r"([?#]|%3f|%23)", url, maxsplit=1, flags=re.IGNORECASE), "", "")[:3]
    links = []  # the parts of a chained URL of fsspec, such as `zip://a.wav::https://host/b.zip`
    for link in re.split(r"::(?=[\w.+-]+://)", address):
        scheme, separator, link = link.partition("//" if link.startswith("//") else "://")
        parts = re.split("@|%40", link)
        authority = re.split(r"[/\\]", link)[0]
        # A colon in an authority precedes a port or a password. A password can contain characters that end an
        # authority, such as `/`, so after a colon any later `@` counts as the end of a password.
        if len(parts) > 1 and (":" in authority or len(re.split("@|%40", authority)) > 1):
            link = f"***@{parts[-1]}"
        # Without `@`, a colon that precedes no port or an `@` in the query may belong to a password
        elif not re.fullmatch(r"(?:\[[^\]]*\]|(?:[^:]|::)*)(?::\d*)?", authority) or (
            ":" in authority and "@" in query
        ):
            link = "***"
        links.append(f"{scheme}{separator}{link}" if separator else scheme)
    return _LOGIN.sub("***@", "::".join(links)) + (f"{mark}***" if mark else "")
