"""Write a Llama-architecture GGUF of a given shape with random weights and the vocabulary of another GGUF.

Speed and memory depend on shapes alone, so it stands in for a trained model in benchmarks. Two things are not left to
chance, because they would spoil a measurement and cost nothing to settle:

- Greedy decoding only ever picks tokens that are whole text. Half a character, a control token or an end would be a
  token that no client sees, and the time between two events would no longer be the time of a token.
- With --phrase-tokens N the model repeats itself: its output matrix maps the words of the vocabulary onto each other in
  cycles of N, which is what looking ahead in the text is made for. Its matrices are multiplied like any other's.

Beside OUT.gguf it writes OUT.words, a word a line, each of which is one token behind a space, and with --phrase-tokens
OUT.phrases, a cycle a line.
"""
import argparse
import re
from pathlib import Path

import gguf
import numpy as np

NORMAL_TOKEN = 1
WORD = re.compile(r"Ġ[a-z]{3,8}")
# Words of the vocabulary that the client gets, and cycles that it gets as prompts.
MAX_WORDS, MAX_PHRASES = 4096, 64
# How much of a repeating model's residual stream is its layers' work; more, and they outvote the cycle.
REPEATING_LAYER_GAIN = 0.02

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("vocab")
parser.add_argument("out")
parser.add_argument("--dim", type=int, default=896)
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--ffn", type=int, default=4864)
parser.add_argument("--heads", type=int, default=14)
parser.add_argument("--kv-heads", type=int, default=2)
parser.add_argument("--ctx", type=int, default=32768)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--phrase-tokens", type=int, default=0, help="0: the output matrix is the embedding, as in Qwen2.5-0.5B")
args = parser.parse_args()
rng = np.random.default_rng(args.seed)


def byte_alphabet():
    """The characters that byte-level vocabularies write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def is_text(token, kind, alphabet):
    try:
        return kind == NORMAL_TOKEN and bytes(alphabet[char] for char in token).decode() != ""
    except (KeyError, UnicodeDecodeError):
        return False


def copy_vocabulary(source, writer):
    tokens = kinds = None
    for field in source.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value = field.contents()
        if field.name == "tokenizer.ggml.tokens":
            tokens = value
        elif field.name == "tokenizer.ggml.token_type":
            kinds = value
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(field.name, value)
        else:
            writer.add_key_value(field.name, value, field.types[0])
    return tokens, kinds


writer = gguf.GGUFWriter(args.out, "llama")
tokens, kinds = copy_vocabulary(gguf.GGUFReader(args.vocab), writer)
alphabet = byte_alphabet()
text = np.array([is_text(token, kind, alphabet) for token, kind in zip(tokens, kinds)])
words = np.array([n for n, token in enumerate(tokens) if text[n] and WORD.fullmatch(token)])
spoken = [tokens[n][1:] for n in words]
out = Path(args.out)
out.with_suffix(".words").write_text("\n".join(spoken[:MAX_WORDS]) + "\n")

head_dim = args.dim // args.heads
writer.add_name(f"random-{args.dim}x{args.layers}")
writer.add_context_length(args.ctx)
writer.add_embedding_length(args.dim)
writer.add_block_count(args.layers)
writer.add_feed_forward_length(args.ffn)
writer.add_head_count(args.heads)
writer.add_head_count_kv(args.kv_heads)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_rope_dimension_count(head_dim)
writer.add_rope_freq_base(1e6)
writer.add_vocab_size(len(tokens))
writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def random(*shape, gain=1.0):
    return (rng.standard_normal(shape, dtype=np.float32) * (gain / np.sqrt(shape[-1]))).astype(np.float16)


def ones(name):
    writer.add_tensor(name, np.ones(args.dim, dtype=np.float32))


embedding = random(len(tokens), args.dim)
if args.phrase_tokens:
    cycles = rng.permutation(words)[: len(words) // args.phrase_tokens * args.phrase_tokens].reshape(-1, args.phrase_tokens)
    output = np.zeros_like(embedding)
    output[np.roll(cycles, -1, axis=1).ravel()] = embedding[cycles.ravel()]
    writer.add_tensor("output.weight", output)
    phrases = [" ".join(tokens[n][1:] for n in cycle) for cycle in cycles[:MAX_PHRASES]]
    out.with_suffix(".phrases").write_text("\n".join(phrases) + "\n")
else:
    embedding[~text] = 0
writer.add_tensor("token_embd.weight", embedding)
gain = REPEATING_LAYER_GAIN if args.phrase_tokens else 1.0
for layer in range(args.layers):
    name = f"blk.{layer}."
    ones(name + "attn_norm.weight")
    ones(name + "ffn_norm.weight")
    writer.add_tensor(name + "attn_q.weight", random(args.dim, args.dim))
    writer.add_tensor(name + "attn_k.weight", random(args.kv_heads * head_dim, args.dim))
    writer.add_tensor(name + "attn_v.weight", random(args.kv_heads * head_dim, args.dim))
    writer.add_tensor(name + "attn_output.weight", random(args.dim, args.dim, gain=gain))
    writer.add_tensor(name + "ffn_gate.weight", random(args.ffn, args.dim))
    writer.add_tensor(name + "ffn_up.weight", random(args.ffn, args.dim))
    writer.add_tensor(name + "ffn_down.weight", random(args.dim, args.ffn, gain=gain))
ones("output_norm.weight")
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file(progress=False)
writer.close()
