//! The element types of ggml: number, name, block size, and what each may be used for.
//!
//! The table follows the ggml inside the pinned llama-cpp-sys-2; `tests/llama_source.rs` compares the two. Absent: any
//! arithmetic on the elements themselves.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! ggml_types {
    ($($variant:ident = $id:literal, $name:literal, $block:literal, $bytes:literal;)*) => {
        /// Element type of a tensor, as ggml numbers them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[allow(missing_docs, non_camel_case_types, reason = "the names are ggml's own")]
        pub enum GgmlType { $($variant = $id,)* }

        impl GgmlType {
            /// Every type that this ggml can hold in a file.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The type with ggml's number `id`.
            #[must_use]
            pub fn from_id(id: u32) -> Option<Self> {
                match id { $($id => Some(Self::$variant),)* _ => None }
            }

            /// Its usual name, as in model file names.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Elements per block; a row is a whole number of blocks.
            #[must_use]
            pub fn block_elements(self) -> u64 {
                match self { $(Self::$variant => $block,)* }
            }

            /// Bytes per block.
            #[must_use]
            pub fn block_bytes(self) -> u64 {
                match self { $(Self::$variant => $bytes,)* }
            }
        }
    };
}

ggml_types! {
    F32 = 0, "F32", 1, 4;
    F16 = 1, "F16", 1, 2;
    Q4_0 = 2, "Q4_0", 32, 18;
    Q4_1 = 3, "Q4_1", 32, 20;
    Q5_0 = 6, "Q5_0", 32, 22;
    Q5_1 = 7, "Q5_1", 32, 24;
    Q8_0 = 8, "Q8_0", 32, 34;
    Q8_1 = 9, "Q8_1", 32, 36;
    Q2_K = 10, "Q2_K", 256, 84;
    Q3_K = 11, "Q3_K", 256, 110;
    Q4_K = 12, "Q4_K", 256, 144;
    Q5_K = 13, "Q5_K", 256, 176;
    Q6_K = 14, "Q6_K", 256, 210;
    Q8_K = 15, "Q8_K", 256, 292;
    IQ2_XXS = 16, "IQ2_XXS", 256, 66;
    IQ2_XS = 17, "IQ2_XS", 256, 74;
    IQ3_XXS = 18, "IQ3_XXS", 256, 98;
    IQ1_S = 19, "IQ1_S", 256, 50;
    IQ4_NL = 20, "IQ4_NL", 32, 18;
    IQ3_S = 21, "IQ3_S", 256, 110;
    IQ2_S = 22, "IQ2_S", 256, 82;
    IQ4_XS = 23, "IQ4_XS", 256, 136;
    I8 = 24, "I8", 1, 1;
    I16 = 25, "I16", 1, 2;
    I32 = 26, "I32", 1, 4;
    I64 = 27, "I64", 1, 8;
    F64 = 28, "F64", 1, 8;
    IQ1_M = 29, "IQ1_M", 256, 56;
    BF16 = 30, "BF16", 1, 2;
    TQ1_0 = 34, "TQ1_0", 256, 54;
    TQ2_0 = 35, "TQ2_0", 256, 66;
    MXFP4 = 39, "MXFP4", 32, 17;
    NVFP4 = 40, "NVFP4", 64, 36;
    Q1_0 = 41, "Q1_0", 128, 18;
    Q2_0 = 42, "Q2_0", 64, 18;
}

impl GgmlType {
    /// Name and replacement of a type that ggml has dropped.
    pub(crate) fn removed(id: u32) -> Option<(&'static str, &'static str)> {
        Some(match id {
            4 => ("Q4_2", "Q4_0 or Q4_K_M"),
            5 => ("Q4_3", "Q4_1 or Q4_K_M"),
            31 => ("Q4_0_4_4", "Q4_0, which is repacked at load"),
            32 => ("Q4_0_4_8", "Q4_0, which is repacked at load"),
            33 => ("Q4_0_8_8", "Q4_0, which is repacked at load"),
            36 => ("IQ4_NL_4_4", "IQ4_NL, which is repacked at load"),
            37 => ("IQ4_NL_4_8", "IQ4_NL, which is repacked at load"),
            38 => ("IQ4_NL_8_8", "IQ4_NL, which is repacked at load"),
            _ => return None,
        })
    }

    /// Whether a weight matrix may have it: ggml can look rows up in it and multiply by it.
    ///
    /// The others are integers, or intermediate forms that exist only inside a computation; a model that stores its
    /// weights so reaches an abort or an empty function pointer.
    #[must_use]
    pub fn is_weight(self) -> bool {
        !matches!(self, Self::Q8_1 | Self::Q8_K | Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::F64)
    }

    /// Whether an x86-64 processor multiplies with a matrix of this type from a copy in another order, which rows cannot
    /// be looked up in; `amx`: one with AMX. A type that only AVX-512 has such a copy of is taken to have one.
    #[must_use]
    pub fn is_repacked(self, amx: bool) -> bool {
        match self {
            Self::Q4_0 | Self::Q2_K | Self::Q4_K | Self::IQ4_NL | Self::MXFP4 => true,
            Self::F16 | Self::Q4_1 | Self::Q8_0 | Self::Q5_K | Self::Q6_K | Self::IQ4_XS => amx,
            _ => false,
        }
    }

    /// Bytes that the copy for AMX has for each block beside the block's own: sums, and scales that are unpacked.
    #[must_use]
    pub fn amx_bytes_per_block(self) -> u64 {
        match self {
            Self::Q8_0 | Self::Q4_K | Self::Q5_K => 4,
            Self::IQ4_XS => 2,
            _ => 0,
        }
    }

    /// Bytes of `elements` in whole blocks; saturates.
    #[must_use]
    pub fn row_bytes(self, elements: u64) -> u64 {
        elements.div_ceil(self.block_elements()).saturating_mul(self.block_bytes())
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
