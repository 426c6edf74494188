"""Where the compiler keeps its code."""

import os
from pathlib import Path

from consilience.compute.compiler import keep_code


def test_code_is_kept_in_the_user_s_cache_folder_unless_another_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_code()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == tmp_path / "consilience" / "compiler"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
