//! A writer of GGUF files for the tests: well-formed by default, and able to lie in every field.
//!
//! It shares no code with the reader, so that the two check each other.
#![allow(dead_code, clippy::unwrap_used, unreachable_pub, missing_docs)]

pub mod corpus;

/// Value types by their numbers in the format.
pub mod ty {
    pub const U8: u32 = 0;
    pub const U16: u32 = 2;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
}

/// (number, elements per block, bytes per block) of the element types the tests use.
pub const F32: (u32, u64, u64) = (0, 1, 4);
pub const F16: (u32, u64, u64) = (1, 1, 2);
pub const Q8_0: (u32, u64, u64) = (8, 32, 34);
pub const Q4_K: (u32, u64, u64) = (12, 256, 144);
pub const Q8_K: (u32, u64, u64) = (15, 256, 292);

#[derive(Debug, Clone, PartialEq)]
pub struct Key {
    pub name: Vec<u8>,
    pub kind: u32,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    pub name: Vec<u8>,
    pub shape: Vec<u64>,
    pub kind: u32,
    /// Bytes of its data.
    pub bytes: u64,
    /// Written instead of the right offset.
    pub offset: Option<u64>,
    /// Written instead of the right number of dimensions.
    pub dimensions: Option<u32>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub keys: Vec<Key>,
    pub tensors: Vec<TensorEntry>,
    pub alignment: u64,
    /// Written instead of the right counts.
    pub key_count: Option<u64>,
    pub tensor_count: Option<u64>,
    /// Whether the last tensor is padded like the others.
    pub pad_last: bool,
}

pub fn string(text: &[u8]) -> Vec<u8> {
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(text);
    out
}

pub fn array(kind: u32, length: u64, elements: &[u8]) -> Vec<u8> {
    let mut out = kind.to_le_bytes().to_vec();
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(elements);
    out
}

pub fn strings(texts: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Vec<u8> {
    let (mut out, mut length) = (Vec::new(), 0);
    for text in texts {
        out.extend(string(text.as_ref()));
        length += 1;
    }
    array(ty::STRING, length, &out)
}

/// The characters that byte-level byte-pair encoding writes the 256 bytes with.
pub fn byte_characters() -> Vec<char> {
    let is_printed = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 256_u32..;
    let codes = (0..256_u32).map(|byte| if is_printed(byte) { byte } else { others.next().unwrap() });
    codes.map(|code| char::from_u32(code).unwrap()).collect()
}

/// The hyperparameters of a plain decoder.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    pub architecture: &'static str,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head: u32,
    pub hidden: u32,
    pub vocabulary: u32,
    pub context: u32,
    pub kind: (u32, u64, u64),
    pub file_type: u32,
    pub tied: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            architecture: "llama",
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head: 16,
            hidden: 96,
            vocabulary: 40,
            context: 512,
            kind: Q8_0,
            file_type: 7,
            tied: true,
        }
    }
}

impl Shape {
    pub fn embedding(&self) -> u32 {
        self.heads * self.head
    }
}

impl Gguf {
    pub fn empty() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            keys: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            key_count: None,
            tensor_count: None,
            pad_last: true,
        }
    }

    /// A model that every check accepts.
    pub fn model(shape: &Shape) -> Self {
        let mut file = Self::empty();
        let arch = shape.architecture;
        file.text("general.architecture", arch);
        file.text("general.type", "model");
        file.text("general.name", "Test model");
        file.text("general.version", "v1");
        file.number("general.file_type", shape.file_type);
        for (key, value) in [
            ("block_count", shape.layers),
            ("context_length", shape.context),
            ("embedding_length", shape.embedding()),
            ("feed_forward_length", shape.hidden),
            ("attention.head_count", shape.heads),
            ("attention.head_count_kv", shape.kv_heads),
            ("rope.dimension_count", shape.head),
        ] {
            file.number(&format!("{arch}.{key}"), value);
        }
        file.put(&format!("{arch}.attention.layer_norm_rms_epsilon"), ty::F32, 1e-5_f32.to_le_bytes().to_vec());
        file.text("tokenizer.ggml.model", "gpt2");
        // One that leaves text in characters: tokens of bytes, as others need, would be most of a small vocabulary.
        file.text("tokenizer.ggml.pre", "sarvam-moe");
        file.put("tokenizer.ggml.tokens", ty::ARRAY, strings((0..shape.vocabulary).map(|token| format!("t{token}"))));
        let types: Vec<u8> = (0..shape.vocabulary).flat_map(|_| 1_i32.to_le_bytes()).collect();
        file.put("tokenizer.ggml.token_type", ty::ARRAY, array(ty::I32, shape.vocabulary.into(), &types));
        file.put("tokenizer.ggml.merges", ty::ARRAY, strings(["t 0"]));
        file.put("tokenizer.ggml.add_bos_token", ty::BOOL, vec![0]);
        file.text("tokenizer.chat_template", "{{ messages }}");

        let (embedding, hidden) = (u64::from(shape.embedding()), u64::from(shape.hidden));
        let keys = u64::from(shape.kv_heads * shape.head);
        let vocabulary = u64::from(shape.vocabulary);
        file.tensor("token_embd.weight", &[embedding, vocabulary], shape.kind);
        if !shape.tied {
            file.tensor("output.weight", &[embedding, vocabulary], shape.kind);
        }
        file.tensor("output_norm.weight", &[embedding], F32);
        for layer in 0..shape.layers {
            let mut add = |part: &str, shape: &[u64], kind| {
                file.tensor(&format!("blk.{layer}.{part}.weight"), shape, kind);
            };
            add("attn_norm", &[embedding], F32);
            add("attn_q", &[embedding, embedding], shape.kind);
            add("attn_k", &[embedding, keys], shape.kind);
            add("attn_v", &[embedding, keys], shape.kind);
            add("attn_output", &[embedding, embedding], shape.kind);
            add("ffn_norm", &[embedding], F32);
            add("ffn_gate", &[embedding, hidden], shape.kind);
            add("ffn_up", &[embedding, hidden], shape.kind);
            add("ffn_down", &[hidden, embedding], shape.kind);
        }
        file.complete()
    }

    pub fn put(&mut self, name: &str, kind: u32, bytes: Vec<u8>) {
        let name = name.as_bytes().to_vec();
        match self.keys.iter_mut().find(|key| key.name == name) {
            Some(key) => (key.kind, key.bytes) = (kind, bytes),
            None => self.keys.push(Key { name, kind, bytes }),
        }
    }

    pub fn text(&mut self, name: &str, text: &str) {
        self.put(name, ty::STRING, string(text.as_bytes()));
    }

    pub fn number(&mut self, name: &str, value: u32) {
        self.put(name, ty::U32, value.to_le_bytes().to_vec());
    }

    pub fn remove(&mut self, name: &str) {
        self.keys.retain(|key| key.name != name.as_bytes());
    }

    pub fn tensor(&mut self, name: &str, shape: &[u64], (kind, block, bytes): (u32, u64, u64)) {
        let bytes = shape.iter().product::<u64>() / block * bytes;
        let name = name.as_bytes().to_vec();
        self.tensors.push(TensorEntry { name, shape: shape.to_vec(), kind, bytes, offset: None, dimensions: None });
    }

    pub fn named(&mut self, name: &str) -> &mut TensorEntry {
        self.tensors.iter_mut().find(|tensor| tensor.name == name.as_bytes()).unwrap()
    }

    /// The header up to the tensor data, and the length of the whole file.
    pub fn header(&self) -> (Vec<u8>, u64) {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for key in &self.keys {
            out.extend(string(&key.name));
            out.extend(key.kind.to_le_bytes());
            out.extend(&key.bytes);
        }
        let (mut next, mut end) = (0, 0);
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend(tensor.dimensions.unwrap_or(tensor.shape.len() as u32).to_le_bytes());
            for dimension in &tensor.shape {
                out.extend(dimension.to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(next).to_le_bytes());
            end = next + tensor.bytes;
            next = end.next_multiple_of(self.alignment);
        }
        if !self.tensors.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        }
        let file_bytes = out.len() as u64 + if self.pad_last { next } else { end };
        (out, file_bytes)
    }

    /// An encoder of this architecture, with the tensors that all have.
    pub fn encoder(architecture: &str) -> Self {
        let mut file = Self::empty();
        file.text("general.architecture", architecture);
        let numbers =
            [("block_count", 1), ("context_length", 64), ("embedding_length", 64), ("feed_forward_length", 96)];
        for (key, value) in numbers.into_iter().chain([("attention.head_count", 4), ("pooling_type", 1)]) {
            file.number(&format!("{architecture}.{key}"), value);
        }
        file.put(&format!("{architecture}.attention.layer_norm_epsilon"), ty::F32, 1e-5_f32.to_le_bytes().to_vec());
        file.put(&format!("{architecture}.attention.causal"), ty::BOOL, vec![0]);
        file.text("tokenizer.ggml.model", "bert");
        file.number("tokenizer.ggml.token_type_count", 2);
        file.put("tokenizer.ggml.tokens", ty::ARRAY, strings((0..120).map(|token| format!("t{token}"))));
        for (name, shape) in [
            ("token_embd.weight", &[64, 120][..]),
            ("position_embd.weight", &[64, 64]),
            ("blk.0.attn_q.weight", &[64, 64]),
            ("blk.0.ffn_up.weight", &[64, 96]),
        ] {
            file.tensor(name, shape, F16);
        }
        file.tensor("token_embd_norm.weight", &[64], F32);
        file.complete()
    }

    /// What a well-formed file says, so that it can be written again with a change. Shares no code with the reader either.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut at = 24;
        let mut take = |count: usize| {
            at += count;
            &bytes[at - count..at]
        };
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let mut file = Self::empty();
        let (tensors, keys) = (number(&bytes[8..16]), number(&bytes[16..24]));
        for _ in 0..keys {
            let length = number(take(8)) as usize;
            let name = take(length).to_vec();
            let kind = u32::from_le_bytes(take(4).try_into().unwrap());
            let size = |kind: u32| [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8][kind as usize];
            let mut value = Vec::new();
            let (element, count) = if kind == ty::ARRAY {
                value.extend(take(12));
                (u32::from_le_bytes(value[..4].try_into().unwrap()), number(&value[4..]))
            } else {
                (kind, 1)
            };
            for _ in 0..count {
                if element == ty::STRING {
                    let length = take(8);
                    value.extend(length);
                    value.extend(take(number(length) as usize));
                } else {
                    value.extend(take(size(element)));
                }
            }
            file.keys.push(Key { name, kind, bytes: value });
        }
        let mut offsets = Vec::new();
        for _ in 0..tensors {
            let length = number(take(8)) as usize;
            let name = take(length).to_vec();
            let dimensions = u32::from_le_bytes(take(4).try_into().unwrap());
            let shape: Vec<u64> = (0..dimensions).map(|_| number(take(8))).collect();
            let kind = u32::from_le_bytes(take(4).try_into().unwrap());
            offsets.push(number(take(8)));
            file.tensors.push(TensorEntry { name, shape, kind, bytes: 0, offset: None, dimensions: None });
        }
        // Of the length the padding is a part here: the writer adds none to it then.
        offsets.push((bytes.len() - at.next_multiple_of(32)) as u64);
        for (tensor, pair) in file.tensors.iter_mut().zip(offsets.windows(2)) {
            tensor.bytes = pair[1] - pair[0];
        }
        file
    }

    /// Tokens of the vocabulary.
    pub fn vocabulary(&self) -> u64 {
        let tokens = self.keys.iter().find(|key| key.name == b"tokenizer.ggml.tokens").unwrap();
        u64::from_le_bytes(tokens.bytes[4..12].try_into().unwrap())
    }

    /// A model of nothing but what llama.cpp asks of this architecture in any case, with keys that hold together.
    pub fn of(architecture: &str) -> Self {
        let mut file = Self::encoder("bert");
        file.tensors.clear();
        for key in &mut file.keys {
            if key.name.starts_with(b"bert.") {
                key.name.splice(..4, architecture.bytes());
            }
        }
        file.text("general.architecture", architecture);
        let has_experts = |needs: &str| needs.lines().next() == Some(architecture) && needs.contains(" n_expert");
        if include_str!("../../src/needs.txt").split("\n\n").any(has_experts) {
            file.number(&format!("{architecture}.expert_count"), 4);
            file.number(&format!("{architecture}.expert_used_count"), 2);
        }
        let mut file = file.complete();
        // Some ask for less than a layer has, which alone no file is.
        if !file.tensors.iter().any(|tensor| tensor.name.starts_with(b"blk.0.")) {
            file.tensor("blk.0.attn_norm.weight", &[64], F32);
        }
        file
    }

    /// The value of a key with a number of 32 bits.
    fn read_number(&self, name: &str) -> Option<u32> {
        let key = self.keys.iter().find(|key| key.name == name.as_bytes())?;
        Some(u32::from_le_bytes(key.bytes.as_slice().try_into().ok()?))
    }

    /// Adds what llama.cpp cannot load the architecture without, as far as that is known for sure.
    pub fn complete(mut self) -> Self {
        let key = self.keys.iter().find(|key| key.name == b"general.architecture").unwrap();
        let architecture = String::from_utf8(key.bytes[8..].to_vec()).unwrap();
        let needs = include_str!("../../src/needs.txt").split("\n\n");
        let needs = needs.filter_map(|block| block.split_once('\n')).find(|(name, _)| *name == architecture).unwrap().1;
        let number =
            |file: &Self, key: &str| u64::from(file.read_number(&format!("{architecture}.{key}")).unwrap_or(0));
        let layers = number(&self, "block_count");
        let tokens = self.vocabulary();
        for line in needs.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let (kind, name) = (words[0], words[1].split('|').next().unwrap());
            let full = format!("{architecture}.{name}");
            let is_there = |file: &Self, name: &str| {
                file.keys.iter().any(|key| key.name == name.as_bytes())
                    || file.tensors.iter().any(|tensor| tensor.name == name.as_bytes())
            };
            match kind {
                "key" if is_there(&self, &full) => {}
                "key" if name.contains("epsilon") || name.contains("scale") => {
                    self.put(&full, ty::F32, 1e-5_f32.to_le_bytes().to_vec());
                }
                "key" => self.number(&full, 1),
                _ => {
                    let shape: Vec<u64> = words[2..]
                        .iter()
                        .map(|word| match *word {
                            "n_embd" => number(&self, "embedding_length"),
                            "n_vocab" => tokens,
                            "n_expert" => number(&self, "expert_count"),
                            _ => 64,
                        })
                        .collect();
                    let shape = if shape.is_empty() { vec![64, 64] } else { shape };
                    let kind_of = if shape.len() == 1 || name.contains("norm") { F32 } else { F16 };
                    let names = if kind == "layer" {
                        (0..layers).map(|layer| format!("blk.{layer}.{name}")).collect()
                    } else {
                        vec![name.to_owned()]
                    };
                    for name in names.iter().filter(|name| !is_there(&self, name)).cloned().collect::<Vec<_>>() {
                        self.tensor(&name, &shape, kind_of);
                    }
                }
            }
        }
        self
    }

    /// The whole file, with such bytes for weights.
    pub fn filled(&self, byte: u8) -> Vec<u8> {
        let (mut out, file_bytes) = self.header();
        out.resize(file_bytes as usize, byte);
        out
    }

    /// Where in the file a tensor's data is.
    pub fn data_of(&self, name: &str) -> std::ops::Range<usize> {
        let mut at = self.header().0.len() as u64;
        for tensor in &self.tensors {
            if tensor.name == name.as_bytes() {
                return at as usize..(at + tensor.bytes) as usize;
            }
            at = (at + tensor.bytes).next_multiple_of(self.alignment);
        }
        panic!("no tensor {name}");
    }

    /// The whole file, with zeros for weights.
    pub fn file(&self) -> Vec<u8> {
        let (mut out, file_bytes) = self.header();
        out.resize(file_bytes as usize, 0);
        out
    }
}
