"""`transformers serve` on a saved model, in a process that has never imported this package."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
for needed in ("fastapi", "openai", "uvicorn"):
    pytest.importorskip(needed, reason=f"transformers serve needs {needed}: make test-hf installs it")

from hf_sources import TEXT, save, talkative  # noqa: E402

from abc_attn.hf import convert  # noqa: E402

pytestmark = pytest.mark.processes
TEMPLATE = "{% for m in messages %}{{ m['content'] }} </s> {% endfor %}"
MESSAGES = [{"role": "user", "content": TEXT}]  # 90 words, more than there are slots


@pytest.fixture
def folder(tmp_path):
    save(convert(talkative(), "global:2+window:20", positions="slot"), tmp_path / "bounded")
    (tmp_path / "bounded" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "bounded"


@pytest.fixture
def address(folder, tmp_path):
    """Where the model is served."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    options = ["--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [program, "serve", folder, *options], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_until_it_answers(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_it_answers(url, server, log, seconds=600):
    """It loads the model before it listens, which may take minutes on a busy machine."""
    ends = time.monotonic() + seconds
    while True:
        try:
            return asked(url)
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.5)


def asked(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=60) as answer:
        return json.load(answer)


def test_a_saved_model_is_served_and_says_what_it_says_here(folder, address):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    (choice,) = asked(f"{address}/v1/chat/completions", body)["choices"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    given = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True, tokenize=True
    )
    written = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert choice["message"]["content"] == tokenizer.decode(written, skip_special_tokens=True)
    assert len(choice["message"]["content"].split()) == 12
