"""A text and a conversation in one state: nothing is read twice, stopping loses nothing, and states are kept."""

from __future__ import annotations

import io
import os
import re
import signal

import pytest
import torch

transformers = pytest.importorskip("transformers")

from command_line import refused_in_one_line  # noqa: E402
from hf_sources import END, batch, save, source  # noqa: E402

from abc_attn.cli import main  # noqa: E402
from abc_attn.hf import convert, load_state, save_state  # noqa: E402
from abc_attn.hf.streaming import Chat, Stream, as_text  # noqa: E402
from abc_attn.models.saved import load_tokenizer  # noqa: E402

LLAMA, GPT2, PHI3 = transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel, transformers.Phi3ForCausalLM
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w6 {{ m.content }} </s> "
    "{% else %}{{ {'user': 'w3', 'system': 'w4'}[m.role] }} {{ m.content }} w5 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w6{% endif %}"
)
SLOTS = {"control": "global:2+window:6", "positions": "slot"}


@pytest.fixture
def folder(tmp_path):
    """A bounded model with a tokenizer of words and a chat template, that never ends an answer by itself."""
    model = convert(source(LLAMA), **SLOTS)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.lm_head.weight[[0, 1, END, 60]] = 0  # special tokens; among the others, one is above
    save(model, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "chat"


@pytest.fixture
def chat(folder):
    return make_chat(folder)


def make_chat(folder, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return Chat(Stream(model), load_tokenizer(folder), **options)


def watched(chat):
    """All tokens that the model will have read, in order."""
    read = []
    chat.stream.model.register_forward_pre_hook(lambda module, given: read.extend(given[0][0].tolist()))
    return read


def said(chat, text, tokens=5, **options):
    chat.ask(text, tokens)
    return "".join(as_text(chat.tokenizer, chat.stream.write(tokens, **options)))


def test_a_conversation_is_the_template_of_all_its_messages_read_once(folder):
    chat = make_chat(folder, system="w40")
    read, messages = watched(chat), [{"role": "system", "content": "w40"}]
    for question in ("w10 w11", "w12", "w13 w14 w15"):
        answer = said(chat, question)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=False).removesuffix(" </s> ")
    expected = chat.tokenizer(whole, add_special_tokens=False).input_ids
    assert chat.stream.written == 15
    assert read == expected[:-1]  # the last token is written and not read
    assert chat.stream.pending == expected[-1:]
    assert chat.stream.length == len(expected)


def test_stopping_loses_nothing(folder):
    whole, parts = make_chat(folder), make_chat(folder)
    expected = said(whole, "w10 w11", 9)
    read, asked = watched(parts), iter([False, False, False])
    first = said(parts, "w10 w11", 9, stop=lambda: next(asked, True))
    rest = "".join(as_text(parts.tokenizer, parts.stream.write(9 - len(first.split()))))
    assert 0 < len(first.split()) < 9
    assert f"{first} {rest}" == expected
    assert len(read) == whole.stream.read
    parts.ask("w12", 5)
    assert [*parts.stream.write(5, stop=lambda: True)] == []  # before the question is read: it waits
    assert len(parts.stream.pending) > 3


def test_an_answer_ends_where_the_template_ends_it(folder):
    chat = make_chat(folder)
    assert chat.stream.ends == {END}  # the config of this model says nothing
    chat.ask("w10", 5)
    chat.stream.model.lm_head.register_forward_hook(
        lambda module, given, out: out.index_fill(-1, torch.tensor(END), 99)
    )
    assert [*chat.stream.write(5)] == []


def test_a_saved_conversation_goes_on(folder, tmp_path):
    chat, other = make_chat(folder), make_chat(folder)
    said(chat, "w10 w11")
    chat.stream.save(tmp_path / "state")
    other.stream.load(tmp_path / "state")
    assert said(other, "w12") == said(chat, "w12")
    with pytest.raises(ValueError, match="does not fit this model: this state was written by control"):
        Stream(convert(source(LLAMA), "mlp:4")).load(tmp_path / "state")
    with pytest.raises(ValueError, match="holds the states of 2 layers; this model has 3"):
        Stream(convert(source(LLAMA, num_hidden_layers=3), **SLOTS)).load(tmp_path / "state")
    with pytest.raises(ValueError, match="has no bounded state to save: convert the model"):
        Stream(source(LLAMA)).save(tmp_path / "other")


def phi3():
    """A Phi-3 whose rotary factors are others beyond 16 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    model = source(PHI3, max_position_embeddings=64, original_max_position_embeddings=16)
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]}
    made = PHI3(transformers.Phi3Config(**model.config.to_dict() | {"rope_parameters": rope})).eval()
    made.load_state_dict(model.state_dict())
    made.generation_config.update(eos_token_id=None)
    return made


@pytest.mark.parametrize("bounded", [True, False])
def test_a_text_is_read_again_where_rotary_factors_change(bounded, tmp_path, monkeypatch):
    """As generate() does; and a long prompt has the factors of its whole length, however it is added."""
    monkeypatch.setattr("abc_attn.hf.streaming.CHUNK", 6)
    model = convert(phi3(), "global:2+window:6") if bounded else phi3()
    for prompt in ([*range(5, 14)], [*range(5, 29)]):
        options = {"max_new_tokens": 14, "min_new_tokens": 14, "pad_token_id": 1}
        expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        stream, begin = Stream(model), 6
        stream.add(prompt[:begin], 14)
        stream.add(prompt[begin:], 14)
        assert [*stream.write(5), *stream.write(9)] == expected
        assert stream.length == len(prompt) + 14
        assert stream.read == len(prompt) + 13 + (16 if len(prompt) < 17 else 0)


def test_a_loaded_state_cannot_be_read_again(tmp_path):
    model, told = convert(phi3(), "global:2+window:6"), r"beyond 16 tokens this BoundedPhi3ForCausalLM has other rotary"
    for length, goes_on in ((9, False), (20, True)):
        stream = Stream(model)
        stream.add([*range(5, 5 + length)])
        stream.save(tmp_path / "state")
        stream.load(tmp_path / "state")
        stream.add([40])
        if goes_on:
            assert len([*stream.write(9)]) == 9
            continue
        with pytest.raises(ValueError, match=told):
            stream.add([41, 42], 5)
        with pytest.raises(ValueError, match=told):
            [*stream.write(9)]


def test_speed_is_of_writing_alone(chat, monkeypatch):
    """A prompt takes 100 s to read here, and a step 2 s."""
    clock = [0.0]
    monkeypatch.setattr("abc_attn.hf.streaming.time.perf_counter", lambda: clock[0])

    def passes(module, given):
        clock[0] += 100 if given[0].shape[1] > 1 else 2

    chat.stream.model.register_forward_pre_hook(passes)
    assert chat.stream.speed is None
    said(chat, "w10 w11")
    said(chat, "w12 w13")
    assert chat.stream.speed == 0.5


def say_twice(chat):
    again = Chat(chat.stream, chat.tokenizer)
    return said(again, "w10"), said(again, "w11")


def test_templates_that_cannot_be_used(chat):
    for template, problem in (
        (None, "has no chat template"),
        ("{{ nothing.at.all }}", "the chat template cannot be used: UndefinedError"),
        ("w3 {% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not show an answer as it is"),
    ):
        chat.tokenizer.chat_template = template
        with pytest.raises(ValueError, match=problem):
            say_twice(chat)
    chat.stream.reset()
    with pytest.raises(
        ValueError, match="end after 20 tokens: prompt and --tokens may be 21 together, and are 15 and 7"
    ):
        Stream(convert(source(GPT2, n_positions=20), "mlp:4")).add([5] * 15, 7)


def test_long_texts_are_decoded_in_pieces(chat):
    tokens = [3 + i * i % 57 for i in range(300)]
    assert "".join(as_text(chat.tokenizer, iter(tokens))) == chat.tokenizer.decode(tokens)


# The commands


def session(lines, folder, monkeypatch, capsys, *options):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", str(folder), "--tokens", "5", *options]) == 0
    shown = capsys.readouterr()
    return shown.out.splitlines(), shown.err.splitlines()


def test_the_command_chat(folder, tmp_path, monkeypatch, capsys):
    state = str(tmp_path / "state")
    answers, told = session(["w10 w11", f"/save {state}", "", "w12", "/stats"], folder, monkeypatch, capsys)
    assert [len(answer.split()) for answer in answers[:2]] == [5, 5]
    assert told == [f"saved 10 tokens as {os.path.getsize(state):,} bytes: {state}"]
    assert re.match(
        r"20 tokens in this conversation; in this session 19 read and 10 written, .* whatever the", answers[2]
    )
    again, told = session(["w50", f"/load {state}", "w12", "/reset", "w10 w11"], folder, monkeypatch, capsys)
    assert again[1:] == [answers[1], answers[0]]
    assert told == ["loaded a conversation of 10 tokens", "begun anew"]
    loaded, _ = session(["w12", "/quit", "w13"], folder, monkeypatch, capsys, "--load-state", state)
    assert loaded == answers[1:2]
    mistakes = ["/save", f"/save {state}", "/load nowhere", "/what", "/help"]
    shown, told = session(mistakes, folder, monkeypatch, capsys)
    assert shown[0].startswith("/save FILE")
    assert [line.removeprefix("abc-attn: error: ") for line in told] == [
        "/save needs the name of a file",
        "nothing has been said yet: there is no state to save",
        "no state at nowhere: --save-state FILE, or /save FILE in a chat, writes one",
        "no command '/what': /help lists them",
    ]


def test_ctrl_c_stops_the_answer_and_not_the_session(folder, tmp_path, monkeypatch, capsys):
    plain, _ = session(["w10 w11"], folder, monkeypatch, capsys)
    choose, made = Stream._choose, []

    def interrupted(self, logits):
        made.append(choose(self, logits))
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return made[-1]

    monkeypatch.setattr(Stream, "_choose", interrupted)
    shown, _ = session(["w10 w11", "w12", "/stats"], folder, monkeypatch, capsys)
    assert shown[0] == " ".join(plain[0].split()[:2]) + " [stopped]"
    assert len(shown[1].split()) == 5
    assert shown[2].startswith("17 tokens in this conversation")


def test_ctrl_c_in_save_loses_the_file_and_not_the_conversation(folder, tmp_path, monkeypatch, capsys):
    """A question that was stopped is read by /save; a second Ctrl-C is answered between two chunks, or after them."""
    monkeypatch.setattr("abc_attn.hf.streaming.CHUNK", 3)
    chunk, made = Stream._chunk, []

    def interrupted(self):
        made.append(1)
        if len(made) <= 3:  # of 7 tokens: in the question, in the first /save, after all is read in the second
            os.kill(os.getpid(), signal.SIGINT)
        return chunk(self)

    monkeypatch.setattr(Stream, "_chunk", interrupted)
    stopped, saved = str(tmp_path / "stopped"), str(tmp_path / "saved")
    lines = ["w10 w11 w12 w13", f"/save {stopped}", f"/save {stopped}", f"/save {saved}", "/stats"]
    shown, told = session(lines, folder, monkeypatch, capsys)
    assert shown[0] == " [stopped]"
    assert told[:2] == ["stopped: nothing is saved, and the conversation is as it was"] * 2
    assert told[2].startswith("saved 7 tokens as ")
    assert {path.name for path in tmp_path.iterdir()} == {"chat", "saved"}
    assert shown[1].startswith("7 tokens in this conversation; in this session 7 read")


def test_a_tokenizer_that_is_larger_than_the_model(folder, monkeypatch, capsys):
    """Each turn is checked before it becomes part of the text: the next may do without the token."""
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["w99"])
    tokenizer.save_pretrained(folder)
    expected, _ = session(["w10"], folder, monkeypatch, capsys)
    shown, told = session(["w99", "w10"], folder, monkeypatch, capsys)
    problem = "the tokenizer gives token 61, and the model has 61 (vocab_size in config.json): they do not belong to"
    assert [line.partition(problem)[0] for line in told] == ["abc-attn: error: "]
    assert shown == expected
    refused_in_one_line(["generate", str(folder), "--chat", "--prompt", "w99"], problem, capsys)


def test_generate_answers_and_goes_on(folder, tmp_path, monkeypatch, capsys):
    answers, _ = session(["w10 w11", "w12"], folder, monkeypatch, capsys)
    state, command = str(tmp_path / "state"), ["generate", str(folder), "--tokens", "5"]
    assert main([*command, "--chat", "--prompt", "w10 w11", "--save-state", state]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == answers[0]
    assert "template" not in shown.err
    assert main([*command, "--chat", "--prompt", "w12", "--load-state", state]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == answers[1]
    assert shown.err.startswith("5 tokens read, 5 written")  # what closes the answer, and the question
    assert main([*command, "--prompt", "w10 w11"]) == 0
    assert "this model has a chat template: with --chat the prompt is a question" in capsys.readouterr().err
    assert main([*command, "--chat", "--system", "w40", "--prompt", "w10"]) == 0
    assert capsys.readouterr().err.startswith("7 tokens read")
    for options, problem in (
        (["--system", "w40"], "--system is for the beginning of a chat"),
        (["--chat", "--system", "w40", "--load-state", state], "--system is for the beginning of a chat"),
        (["--load-state", f"{state}-no"], "no state at"),
        (["--save-state", "no/such/folder/state"], "cannot be written"),
    ):
        refused_in_one_line([*command, "--prompt", "w5", *options], problem, capsys)


# generate() of transformers, from a state


@pytest.mark.parametrize("cls", [LLAMA, GPT2, transformers.OPTForCausalLM], ids=lambda cls: cls.__name__)
def test_generate_from_a_state_builds_its_mask(cls, tmp_path):
    """New tokens alone, with no mask or the tokenizer's, are as those with the mask of the whole text."""
    model, given = convert(source(cls), "window:3+mlp:4"), batch(left=True)
    with torch.no_grad():
        save_state(model(**given).past_key_values, tmp_path / "state")
    new = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    whole = torch.cat([given["attention_mask"], torch.ones_like(new)], dim=1)
    expected = model.generate(new, attention_mask=whole, past_key_values=load_state(tmp_path / "state"))
    for mask in ({}, {"attention_mask": torch.ones_like(new)}):
        found = model.generate(new, **mask, past_key_values=load_state(tmp_path / "state"))
        assert torch.equal(found, expected)
    cache = load_state(tmp_path / "state")
    model.generate(new, past_key_values=cache)
    assert torch.equal(model.generate(new, past_key_values=cache)[:, :3], new)  # a cache that was not just loaded
    with pytest.raises(ValueError, match=r"has read 12 tokens and 15 are given.* attention_mask of 27 columns"):
        model.generate(torch.cat([given["input_ids"], new], dim=1), past_key_values=load_state(tmp_path / "state"))
    with pytest.raises(ValueError, match="no token is given: a state holds no outputs"):
        model.generate(new[:, :0], past_key_values=load_state(tmp_path / "state"))
