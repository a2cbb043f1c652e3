//! A model in parts.

use std::path::{Path, PathBuf};

/// The demo model in two files, the first of which has keys alone, and where that is.
pub fn split(folder: &Path) -> PathBuf {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/demo-v2.q8_0.gguf");
    let (file, header) = (std::fs::read(&model).unwrap(), gantry_gguf::read_header(&model).unwrap());
    let info = |tensor: &gantry_gguf::Tensor| 8 + tensor.name.len() + 4 + 8 * tensor.shape.len() + 4 + 8;
    let infos: usize = header.tensors().list().iter().map(info).sum();
    let first = &header.tensors().list()[0].name;
    let named = [&(first.len() as u64).to_le_bytes()[..], first.as_bytes()].concat();
    let keys_end = file.windows(named.len()).position(|window| window == named).unwrap();
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let count = header.tensors().list().len();
    let split_keys = |number: u16| {
        let mut keys = Vec::new();
        for (key, kind, value) in [
            ("split.no", 2_u32, number.to_le_bytes().to_vec()),
            ("split.count", 2, 2_u16.to_le_bytes().to_vec()),
            ("split.tensors.count", 5, (count as i32).to_le_bytes().to_vec()),
        ] {
            keys.extend([string(key), kind.to_le_bytes().to_vec(), value].concat());
        }
        keys
    };
    let part = |number: u16, tensors: u64, keys: u64, kept: &[u8], infos: &[u8], data: &[u8]| {
        let mut part = [&file[..8], &tensors.to_le_bytes(), &keys.to_le_bytes(), kept].concat();
        part.extend(split_keys(number));
        part.extend(infos);
        part.resize(part.len().next_multiple_of(32), 0);
        part.extend(data);
        std::fs::write(folder.join(format!("demo-{:05}-of-00002.gguf", number + 1)), part).unwrap();
    };
    let keys = header.metadata().len() as u64;
    part(0, 0, keys + 3, &file[24..keys_end], &[], &[]);
    let data = usize::try_from(header.parts()[0].data_offset).unwrap();
    part(1, count as u64, 3, &[], &file[keys_end..keys_end + infos], &file[data..]);
    folder.join("demo-00001-of-00002.gguf")
}
