//! What of a model goes on GPUs, checked against those there are: a GPU that was asked for and is not there is an error,
//! never a silent run on the CPU.

use llama_cpp_sys_2 as sys;
use serde::{Deserialize, Serialize};

use crate::backend::{Backends, NamedDevice, offload_devices};
use crate::error::ModelError;

/// The most GPUs that share a model; llama.cpp's own limit.
pub const MAX_GPUS: usize = 16;

/// More layers than a model has: all of them.
pub const ALL_LAYERS: u32 = 65_536;

/// The device's name that stands for none.
const NO_DEVICE: &str = "none";

const NO_GPU_WAY_OUT: &str = "To run on the CPU, ask for no layers (--n-gpu-layers 0). To run on a GPU, this machine needs \
                              one with its driver, and its backend, such as libggml-cuda.so, in --backend-dir (`make cuda` builds it). In a pod: \
                              spec.runtime.gpuLayers: 0 without spec.resources.gpu; or spec.resources.gpu, on a node with \
                              its driver, and a server image that has its backend";
const DEVICES_WAY_OUT: &str = "`gantry-server devices` lists them, in the order in which they are counted";

/// How a model is spread over GPUs; the names are llama-server's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSplit {
    /// The GPUs to use, by their names (`CUDA0`), in this order. Empty: all there are. `none`: none.
    pub devices: Vec<String>,
    /// What is split.
    pub mode: SplitMode,
    /// How much each gets, in proportion. Empty: by their free memory.
    pub tensor_split: Vec<u32>,
    /// The GPU that holds the whole model where nothing is split, counted from 0 in the order of the devices.
    pub main_gpu: u32,
}

/// What is split among several GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SplitMode {
    /// Nothing: one GPU has the model.
    None,
    /// Layers, each with its part of the KV cache.
    #[default]
    Layer,
    /// The rows of matrices, where the backend can.
    Row,
}

/// What llama.cpp is told. The vectors are what `llama_model_params` points into.
#[derive(Debug)]
pub(crate) struct Offload {
    pub(crate) n_gpu_layers: i32,
    pub(crate) load_mode: sys::llama_load_mode,
    /// Ends with null. `None`: those that llama.cpp takes by itself.
    pub(crate) devices: Option<Vec<sys::ggml_backend_dev_t>>,
    pub(crate) split_mode: sys::llama_split_mode,
    /// `None`: by their free memory.
    pub(crate) tensor_split: Option<[f32; MAX_GPUS]>,
    pub(crate) main_gpu: i32,
}

/// Checks what is asked against the GPUs there are. `layers`: `None`, all that can be; 0, no GPU.
pub(crate) fn offload(layers: Option<u32>, split: &GpuSplit, backends: &Backends) -> Result<Offload, ModelError> {
    let names: Vec<&str> = split.devices.iter().map(String::as_str).collect();
    if layers == Some(0) || names == [NO_DEVICE] {
        return Ok(Offload::none());
    }
    let asked = asked(layers, &names);
    let fail = |problem: String, way_out: &'static str| ModelError::Gpu {
        asked: asked.clone().unwrap_or_else(|| String::from("layers go on GPUs by themselves")),
        problem,
        found: backends.describe(),
        way_out,
    };
    if asked.is_some() && backends.gpus().next().is_none() {
        return Err(fail(String::from("no GPU was found"), NO_GPU_WAY_OUT));
    }
    let devices =
        offload_devices(&split.devices).map_err(|name| fail(format!("no GPU has the name {name}"), DEVICES_WAY_OUT))?;
    if devices.is_empty() {
        return Ok(Offload::none());
    }
    check(split, devices.len()).map_err(|problem| fail(problem, DEVICES_WAY_OUT))?;
    Ok(Offload::on(layers, split, (!names.is_empty()).then_some(&devices)))
}

/// What was asked for, where a GPU was.
fn asked(layers: Option<u32>, names: &[&str]) -> Option<String> {
    match (layers, names) {
        (_, [_, ..]) => Some(format!("the devices {} were asked for", names.join(", "))),
        (Some(ALL_LAYERS..), []) => Some(String::from("all layers on a GPU were asked for")),
        (Some(layers), []) => Some(format!("{layers} layers on a GPU were asked for")),
        (None, []) => None,
    }
}

/// Whether the split goes together with so many GPUs.
fn check(split: &GpuSplit, gpus: usize) -> Result<(), String> {
    let counted = if gpus == 1 { String::from("there is one") } else { format!("there are {gpus}") };
    if gpus > MAX_GPUS {
        return Err(format!("{counted}, more than the {MAX_GPUS} that can share a model: choose some by their names"));
    }
    if split.mode == SplitMode::None && split.main_gpu as usize >= gpus {
        return Err(format!("GPU {} (main_gpu, counted from 0) is to hold the model, and {counted}", split.main_gpu));
    }
    if split.tensor_split.len() > gpus {
        let parts = split.tensor_split.len();
        return Err(format!("the model is to be split in {parts} (tensor_split), and {counted}"));
    }
    if !split.tensor_split.is_empty() && split.tensor_split.iter().all(|&part| part == 0) {
        return Err(String::from("every part of the split (tensor_split) is 0"));
    }
    Ok(())
}

impl Offload {
    /// Everything on the CPU, whatever devices there are.
    fn none() -> Self {
        Self {
            n_gpu_layers: 0,
            // Into memory of the process: on huge pages, and whatever becomes of the file.
            load_mode: sys::LLAMA_LOAD_MODE_NONE,
            devices: Some(vec![std::ptr::null_mut()]),
            split_mode: sys::LLAMA_SPLIT_MODE_LAYER,
            tensor_split: None,
            main_gpu: 0,
        }
    }

    fn on(layers: Option<u32>, split: &GpuSplit, devices: Option<&Vec<NamedDevice>>) -> Self {
        let tensor_split = (!split.tensor_split.is_empty()).then(|| {
            let mut parts = [0.0; MAX_GPUS];
            for (part, &given) in parts.iter_mut().zip(&split.tensor_split) {
                // Proportions: what a float cannot tell apart does not matter.
                *part = given as f32;
            }
            parts
        });
        Self {
            // From the mapped file, where the devices can.
            load_mode: sys::LLAMA_LOAD_MODE_AUTO,
            // Negative: all.
            n_gpu_layers: layers.map_or(-1, |n| i32::try_from(n).unwrap_or(i32::MAX)),
            devices: devices.map(|all| all.iter().map(|one| one.raw).chain([std::ptr::null_mut()]).collect()),
            split_mode: match split.mode {
                SplitMode::None => sys::LLAMA_SPLIT_MODE_NONE,
                SplitMode::Layer => sys::LLAMA_SPLIT_MODE_LAYER,
                SplitMode::Row => sys::LLAMA_SPLIT_MODE_ROW,
            },
            tensor_split,
            main_gpu: i32::try_from(split.main_gpu).unwrap_or(i32::MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::backend::{Device, DeviceKind};

    fn backends() -> Backends {
        let cpu = Device { name: "CPU".into(), description: "EPYC".into(), kind: DeviceKind::Cpu, ..Device::default() };
        Backends {
            cpu: "zen4".into(),
            devices: vec![cpu],
            not_loaded: vec!["libggml-cuda.so was not loaded: x".into()],
            ..Backends::default()
        }
    }

    fn devices(names: &[&str]) -> GpuSplit {
        GpuSplit { devices: names.iter().map(|&name| name.to_owned()).collect(), ..GpuSplit::default() }
    }

    #[test]
    fn a_gpu_that_was_asked_for_and_is_not_there_is_an_error_with_a_way_out() {
        for (layers, split, asked) in [
            (Some(1), GpuSplit::default(), "1 layers on a GPU were asked for, and no GPU was found"),
            (Some(ALL_LAYERS), GpuSplit::default(), "all layers on a GPU were asked for, and no GPU was found"),
            (None, devices(&["CUDA0"]), "the devices CUDA0 were asked for, and no GPU was found"),
        ] {
            let error = offload(layers, &split, &backends()).unwrap_err().to_string();
            for part in [asked, "CPU (EPYC)", "zen4", "libggml-cuda.so was not loaded: x", "--n-gpu-layers 0"] {
                assert!(error.contains(part), "{part} is missing in: {error}");
            }
        }
    }

    #[test]
    fn nothing_asked_runs_on_the_cpu() {
        for (layers, split) in [
            (None, GpuSplit::default()),
            (None, GpuSplit { tensor_split: vec![3, 1], main_gpu: 7, ..GpuSplit::default() }),
            (None, devices(&["none"])),
            (Some(9), devices(&["none"])),
            (Some(0), devices(&["CUDA0"])),
        ] {
            let offload = offload(layers, &split, &backends()).unwrap();
            assert_eq!(
                (offload.n_gpu_layers, offload.devices),
                (0, Some(vec![std::ptr::null_mut()])),
                "{layers:?} {split:?}"
            );
        }
    }

    #[test]
    fn a_split_must_go_together_with_the_gpus() {
        let split = |mode, tensor_split: &[u32], main_gpu| GpuSplit {
            mode,
            tensor_split: tensor_split.to_vec(),
            main_gpu,
            ..GpuSplit::default()
        };
        for (split, gpus, wanted) in [
            (GpuSplit::default(), 1, None),
            (split(SplitMode::Row, &[3, 1], 0), 2, None),
            (split(SplitMode::Layer, &[1], 0), 2, None),
            (split(SplitMode::Layer, &[3, 1], 0), 1, Some("split in 2 (tensor_split), and there is one")),
            (split(SplitMode::Layer, &[0, 0], 0), 2, Some("is 0")),
            (split(SplitMode::None, &[], 1), 2, None),
            (
                split(SplitMode::None, &[], 2),
                2,
                Some("GPU 2 (main_gpu, counted from 0) is to hold the model, and there are 2"),
            ),
            (split(SplitMode::Layer, &[], 9), 2, None),
            (GpuSplit::default(), MAX_GPUS + 1, Some("there are 17, more than the 16")),
        ] {
            match (check(&split, gpus), wanted) {
                (Ok(()), None) => {}
                (Err(problem), Some(text)) => assert!(problem.contains(text), "{problem}"),
                (result, _) => panic!("{split:?} on {gpus}: {result:?}"),
            }
        }
    }

    #[test]
    fn proportions_and_layers_are_passed_on() {
        let split = GpuSplit { tensor_split: vec![3, 1], mode: SplitMode::Row, ..GpuSplit::default() };
        let device = NamedDevice { raw: std::ptr::dangling_mut() };
        let offload = Offload::on(Some(20), &split, Some(&vec![device, device]));
        assert_eq!(
            (offload.n_gpu_layers, offload.devices, offload.split_mode),
            (20, Some(vec![device.raw, device.raw, std::ptr::null_mut()]), sys::LLAMA_SPLIT_MODE_ROW)
        );
        assert_eq!(offload.tensor_split.unwrap()[..3], [3.0, 1.0, 0.0]);
        let offload = Offload::on(None, &GpuSplit::default(), None);
        assert_eq!((offload.n_gpu_layers, offload.devices), (-1, None));
        // SAFETY: reads a constant.
        assert_eq!(unsafe { sys::llama_max_devices() }, MAX_GPUS);
    }
}
