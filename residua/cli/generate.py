"""`residua generate`: continue text with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from residua.cli.options import Checkpoint, Device, Precision, Threads, argument, option, use_threads
from residua.errors import UserError

if TYPE_CHECKING:
    from typing import Literal

    from residua.generate.generator import Completion, Generator, Request, Speed

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def generate(
    model: Annotated[Path, argument("A folder written by `residua train` or `residua export`.", metavar="RUN")],
    prompt: Annotated[list[str] | None, option("A text to continue; several go in one batch.")] = None,
    file: Annotated[Path | None, option("A text file with one prompt per line.")] = None,
    chat: Annotated[bool, option("Chat with the model.", "--chat")] = False,
    tokens: Annotated[int, option("At most this many new tokens per prompt.", min=1)] = 128,
    temperature: Annotated[float, option("0 is greedy: always the most likely token.")] = 0.8,
    top_k: Annotated[int | None, option("Sample from the k most likely tokens.", default="all")] = None,
    top_p: Annotated[float, option("Sample from the most likely tokens whose probabilities add up to this.")] = 1.0,
    seed: Annotated[int, option("Seed of the sampling; prompt i uses seed + i.")] = 0,
    stop: Annotated[list[str] | None, option("Stop before this text; may be given several times.")] = None,
    checkpoint: Checkpoint = "last",
    engine: Annotated[
        str,
        option("How a step runs; auto is a CUDA graph on a GPU, otherwise eager.", metavar="auto|eager|graph|compile"),
    ] = "auto",
    device: Device = "auto",
    precision: Precision = "auto",
    threads: Threads = None,
) -> None:
    """Continue text with a trained model, token by token.

    \b
    residua generate runs/tiny --prompt "def __init__(self"
    residua generate runs/tiny --prompt "import " --prompt "class " --temperature 0 --tokens 40
    residua generate runs/tiny --file prompts.txt --top-k 50 --top-p 0.9 --seed 7
    residua generate runs/tiny --chat

    A base model has no chat template: --chat keeps the conversation as plain text
    ("User: ...", "Model: ...") and drops the oldest turns when the context is full.
    """
    prompts = _prompts(prompt, file, chat)
    from residua.generate.sample import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    from residua.generate.generator import Generator, Request
    from residua.machine import choose_device
    from residua.storage.hugging_face import stop_ids
    from residua.storage.model_folder import open_model, place

    use_threads(threads)
    where = choose_device(device, "--device")
    loaded, tokenizer = open_model(model, cast("Literal['last', 'best']", checkpoint))
    generator = Generator(place(loaded, where, precision), tokenizer, engine=engine, ends=stop_ids(model))
    request = Request(tokens, sampling, tuple(stop or ()))
    if chat:
        _chat(generator, request)
    else:
        _continue(generator, request, prompts)


def _prompts(prompt: list[str] | None, file: Path | None, chat: bool) -> list[str]:
    sources = sum((bool(prompt), file is not None, chat))
    if sources > 1:
        raise UserError("--prompt, --file and --chat cannot be combined: give one of them.")
    if not sources:
        raise UserError("no prompt was given: use --prompt TEXT, --file PROMPTS.txt or --chat.")
    if file is None:
        return prompt or []
    if file.exists() and not file.is_file():
        raise UserError(f"{file} is not a regular file: --file is a text file with one prompt per line.")
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text: convert it first.") from None
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}): --file is a text file with one prompt per line."
        ) from None
    if not lines:
        raise UserError(f"{file} has no prompts: write one per line.")
    return lines


def _continue(generator: Generator, request: Request, prompts: list[str]) -> None:
    from residua.report.plain import printable

    if len(prompts) == 1:
        # check first, so that an error is not printed after the echoed prompt
        generator.check(prompts, request)
        typer.echo(printable(prompts[0]), nl=False)
        done, speed = generator(prompts, request, show=lambda _, piece: typer.echo(printable(piece), nl=False))
        typer.echo()
    else:
        from residua.report.terminal import ProgressBars, open_console

        generator.check(prompts, request)
        with ProgressBars(open_console(None, stderr=True)) as bars:
            done, speed = generator(prompts, request, progress=bars.track("tokens"))
        for text, completion in zip(prompts, done, strict=True):
            typer.echo(f"--- {printable(text)}\n{printable(completion.text)}")
    typer.echo(_summary(done, request, speed), err=True)


def _chat(generator: Generator, request: Request) -> None:
    from residua.generate.text import Conversation
    from residua.report.plain import printable

    conversation = Conversation(generator, request)
    typer.echo("Type and press Enter; an empty line or Ctrl-D ends the chat.", err=True)
    while (line := _read_line()).strip():
        typer.echo("Model:", nl=False)
        try:
            done, speed = conversation.say(line, show=lambda _, piece: typer.echo(printable(piece), nl=False))
        except UserError as refused:
            typer.echo(f"\n{printable(str(refused))}", err=True)
            continue
        typer.echo()
        typer.echo(_summary(done, request, speed), err=True)


def _read_line() -> str:
    """The next line of the user; empty at the end of the input."""
    try:
        return input("User: ")
    except EOFError:
        typer.echo()
        return ""


def _summary(done: list[Completion], request: Request, speed: Speed) -> str:
    """`60 tokens (length), 950 tokens/s, 12.3 GB/s of 0.25 GB weights; prompt 17 tokens in 0.02 s`.

    A single token comes from the prompt's pass: no step was timed, and no speed is given.
    """
    from residua.reading import counted

    ends = ", ".join(sorted({_end(completion, request) for completion in done}))
    pace = (
        f", {speed.tokens_per_second:,.1f} tokens/s, {speed.bytes_per_second / 1e9:,.2f} GB/s of "
        f"{speed.bytes_per_step / 1e9:.3g} GB of weights"
    )
    return (
        f"[{counted(speed.new_tokens, 'token')} ({ends}){pace if speed.steps else ''}; "
        f"prompt: {counted(speed.prompt_tokens, 'token')} in {speed.prefill_seconds:.2f} s]"
    )


def _end(completion: Completion, request: Request) -> str:
    full = completion.reason == "length" and len(completion.tokens) < request.tokens
    return "end of the model's context" if full else completion.reason
