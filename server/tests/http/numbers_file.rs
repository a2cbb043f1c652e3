//! Models whose files say more than they did.

/// A model's file with further numbers among its metadata.
pub fn with_numbers(file: &[u8], numbers: &[(&str, u32)]) -> Vec<u8> {
    /// Magic, version, count of tensors, count of keys.
    const HEADER: usize = 24;
    const U32: u32 = 4;
    const TEXT: u32 = 8;
    /// To a multiple of which what follows is moved, so that tensors stay aligned.
    const ALIGNMENT: usize = 32;
    let mut added = Vec::new();
    let key = |added: &mut Vec<u8>, key: &str, kind: u32| {
        added.extend((key.len() as u64).to_le_bytes());
        added.extend(key.as_bytes());
        added.extend(kind.to_le_bytes());
    };
    for (name, number) in numbers {
        key(&mut added, name, U32);
        added.extend(number.to_le_bytes());
    }
    key(&mut added, "general.filler", TEXT);
    let filler = ALIGNMENT - (added.len() + 8) % ALIGNMENT;
    added.extend((filler as u64).to_le_bytes());
    added.extend(" ".repeat(filler).bytes());
    let mut header = file[..HEADER].to_vec();
    let keys = u64::from_le_bytes(header[16..].try_into().unwrap()) + numbers.len() as u64 + 1;
    header[16..].copy_from_slice(&keys.to_le_bytes());
    [header, added, file[HEADER..].to_vec()].concat()
}
