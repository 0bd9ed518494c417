# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""No function of the package takes a trainer or reads another object's private names; imports are found."""

import house


def test_no_function_takes_a_trainer():
    assert house.takes_a_trainer() == []


def test_private_names_stay_with_their_object():
    assert house.private_of_others() == []


def test_names_that_a_package_offers_are_of_their_modules(tmp_path, monkeypatch):
    """Also attributes of a package that is imported, and names that a package has from one within it."""
    monkeypatch.setattr(house, "ROOT", tmp_path)
    texts = {
        "p/__init__.py": "if 0:\n    from .a import f\n    from .q import g",
        "p/a.py": "",
        "p/q/__init__.py": "from .b import g",
        "p/q/b.py": "from ..a import f",
        "test_x.py": "import p.a\nfrom p import q\n\nq.g()",
        "test_y.py": "from p import f, g",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    known = {"p": "p/__init__.py", "p.a": "p/a.py", "p.q": "p/q/__init__.py", "p.q.b": "p/q/b.py"}
    known = {name: tmp_path / path for name, path in known.items()}
    assert house.imports(known["p.q.b"], known) == {"p.a"}
    assert house.imports(tmp_path / "test_x.py", known) == {"p.a", "p.q", "p.q.b"}
    assert house.imports(tmp_path / "test_y.py", known) == {"p", "p.a", "p.q", "p.q.b"}
