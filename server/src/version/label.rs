//! What a model is called.

use gantry_engine::ModelInfo;
use gantry_gguf::human_count;

/// Architecture, parameters and quantisation: `llama 135M Q8_0`. llama.cpp's own line names a size class, found by layers
/// and width, which is another number for small models, and a question mark where it knows none.
#[must_use]
pub fn label(model: &ModelInfo) -> String {
    let size = human_count(model.parameters);
    let mut words = model.description.splitn(3, ' ');
    match (words.next(), words.next(), words.next()) {
        (Some(architecture), Some(_), Some(quantization)) => format!("{architecture} {size} {quantization}"),
        _ => format!("{} {size}", model.description),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_called_by_the_weights_that_it_has() {
        for (description, parameters, called) in [
            ("llama 256M Q8_0", 134_515_008, "llama 135M Q8_0"),
            ("llama ?B Q4_K - Medium", 3_670_000, "llama 3.67M Q4_K - Medium"),
            ("gemma3 270M Q4_K - Medium", 268_098_176, "gemma3 268M Q4_K - Medium"),
            ("scripted", 1_000, "scripted 1.00K"),
        ] {
            let model = ModelInfo { description: description.to_owned(), parameters, ..ModelInfo::default() };
            assert_eq!(label(&model), called);
        }
    }
}
