"""What other toolkits call the keys of a run, for the advice about an unknown key."""

from __future__ import annotations

from collections.abc import Collection

CALLED = {
    "model.layers": "depth n_layer n_layers num_layers num_hidden_layers",
    "model.width": "dim d_model n_embd hidden_size embed_dim model_dim",
    "model.context": "block_size max_seq_len max_position_embeddings context_length",
    "model.vocab_size": "vocab n_vocab",
    "model.attention.heads": "heads n_head n_heads num_heads num_attention_heads",
    "model.attention.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads",
    "model.ffn.hidden": "d_ff ffn_dim intermediate_size mlp_dim",
    "data.sequence": "seq seq_len seq_length sequence_length",
    "train.steps": "max_steps max_iters num_steps iterations",
    "train.micro_batch": "batch batch_size micro_batch_size local_batch_size per_device_train_batch_size",
    "train.accumulate": "grad_accum gradient_accumulation gradient_accumulation_steps",
    "train.optimizer.lr": "lr learning_rate max_lr",
    "train.optimizer.weight_decay": "weight_decay wd",
    "train.schedule.warmup": "warmup warmup_steps warmup_iters",
    "train.validate_every": "eval_every eval_interval eval_steps",
    "train.save_every": "checkpoint_every save_steps save_interval",
}  # fmt: skip
"""Keys of a run, and words that are used for them elsewhere."""

_HERE = {word: key for key, words in CALLED.items() for word in words.split()}
_SECTIONS = {key.partition(".")[0] for key in CALLED}


def called_here(key: str, known: Collection[str] = ()) -> str | None:
    """The key that is meant by an unknown one.

    It is one of the `known` keys of the same table, or, for a key directly in a section such as `train.lr`, any.
    """
    section, _, rest = key.partition(".")
    here = _HERE.get(rest.rpartition(".")[2].lower()) if section in _SECTIONS else None
    if here is None:
        return None
    last = here.rpartition(".")[2]
    return last if last in known else here if "." not in rest else None
