//! What computes: ggml's devices, as its registry has them once the backends are loaded.

use std::ffi::{CStr, c_char};

use llama_cpp_sys_2 as sys;
use serde::{Deserialize, Serialize};

/// A device of a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// As it is chosen by: `CPU`, `CUDA0`.
    pub name: String,
    /// What it is: `NVIDIA H200`.
    pub description: String,
    /// What sort of device it is.
    pub kind: DeviceKind,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// The part of it that was free when the process began; of main memory, what could be had without swapping.
    pub free_bytes: u64,
}

/// What sort of device it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// The processor, with main memory.
    #[default]
    Cpu,
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that shares main memory.
    IntegratedGpu,
    /// Helps the processor, with main memory.
    Accelerator,
}

impl DeviceKind {
    /// A word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
            Self::IntegratedGpu => "integrated_gpu",
            Self::Accelerator => "accelerator",
        }
    }

    /// `None`: a device made of others.
    fn of(kind: sys::ggml_backend_dev_type) -> Option<Self> {
        match kind {
            sys::GGML_BACKEND_DEVICE_TYPE_CPU => Some(Self::Cpu),
            sys::GGML_BACKEND_DEVICE_TYPE_GPU => Some(Self::Gpu),
            sys::GGML_BACKEND_DEVICE_TYPE_IGPU => Some(Self::IntegratedGpu),
            sys::GGML_BACKEND_DEVICE_TYPE_ACCEL => Some(Self::Accelerator),
            _ => None,
        }
    }
}

/// A device as llama.cpp is told of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamedDevice {
    pub(crate) raw: sys::ggml_backend_dev_t,
}

/// All devices.
pub(super) fn list() -> Vec<Device> {
    raw_devices().filter_map(describe).collect()
}

/// The devices that can take layers: those of these names in this order, or those that llama.cpp takes by itself, which
/// are the integrated GPUs only where there is no other. `Err` is the name that is not there.
pub(crate) fn offload_devices(names: &[String]) -> Result<Vec<NamedDevice>, String> {
    let all: Vec<(Device, NamedDevice)> =
        raw_devices().filter_map(|raw| Some((describe(raw)?, NamedDevice { raw }))).collect();
    let of = |kind| all.iter().filter(move |(device, _)| device.kind == kind);
    if names.is_empty() {
        let mut chosen: Vec<NamedDevice> = of(DeviceKind::Gpu).map(|(_, raw)| *raw).collect();
        if chosen.is_empty() {
            chosen = of(DeviceKind::IntegratedGpu).map(|(_, raw)| *raw).collect();
        }
        return Ok(chosen);
    }
    let find = |name: &String| {
        let mut gpus = of(DeviceKind::Gpu).chain(of(DeviceKind::IntegratedGpu));
        let found = gpus.find(|(device, _)| device.name.eq_ignore_ascii_case(name));
        found.map(|(_, raw)| *raw).ok_or_else(|| name.clone())
    };
    names.iter().map(find).collect()
}

/// What the CPU backend uses, as it says.
pub(super) fn cpu_features() -> Vec<String> {
    type Features = unsafe extern "C" fn(sys::ggml_backend_reg_t) -> *mut sys::ggml_backend_feature;
    let mut names = Vec::new();
    // SAFETY: the registry is complete. The function of this name in the pinned ggml has this type and answers with an
    // array that lives as long as its backend and ends with a name that is null.
    unsafe {
        let device = sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU);
        if device.is_null() {
            return names;
        }
        let registry = sys::ggml_backend_dev_backend_reg(device);
        let address = sys::ggml_backend_reg_get_proc_address(registry, c"ggml_backend_get_features".as_ptr());
        if address.is_null() {
            return names;
        }
        let mut feature = std::mem::transmute::<*mut std::ffi::c_void, Features>(address)(registry);
        while !feature.is_null() && !(*feature).name.is_null() {
            if text((*feature).value) == "1" {
                names.push(text((*feature).name));
            }
            feature = feature.add(1);
        }
    }
    names
}

fn raw_devices() -> impl Iterator<Item = sys::ggml_backend_dev_t> {
    // SAFETY: the registry is complete; the index is below its count.
    (0..unsafe { sys::ggml_backend_dev_count() }).map(|index| unsafe { sys::ggml_backend_dev_get(index) })
}

fn describe(raw: sys::ggml_backend_dev_t) -> Option<Device> {
    let (mut free, mut total) = (0_usize, 0_usize);
    // SAFETY: a device of the registry, which lives as long as the process; its texts do too.
    unsafe {
        let kind = DeviceKind::of(sys::ggml_backend_dev_type(raw))?;
        sys::ggml_backend_dev_memory(raw, &raw mut free, &raw mut total);
        Some(Device {
            name: text(sys::ggml_backend_dev_name(raw)),
            description: text(sys::ggml_backend_dev_description(raw)),
            kind,
            memory_bytes: total as u64,
            // ggml says of main memory that all of it is free.
            free_bytes: available(kind).unwrap_or(free as u64),
        })
    }
}

/// What can be had of main memory without swapping, where that is what a device has; `None`: it has its own, or nobody knows.
fn available(kind: DeviceKind) -> Option<u64> {
    (kind == DeviceKind::Cpu)
        .then(|| std::fs::read_to_string("/proc/meminfo").ok())
        .flatten()
        .as_deref()
        .and_then(available_in)
}

fn available_in(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// # Safety
/// Null, or a NUL-terminated text.
unsafe fn text(raw: *const c_char) -> String {
    if raw.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(raw) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_main_memory_not_all_is_free() {
        assert_eq!(available_in("MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:  3000 kB\n"), Some(3000 * 1024));
        assert_eq!(available_in("MemTotal:  4000 kB\n"), None);
        assert_eq!(available(DeviceKind::Gpu), None);
        let cpu = raw_devices().filter_map(describe).find(|device| device.kind == DeviceKind::Cpu);
        assert!(cpu.is_none_or(|cpu| (1..cpu.memory_bytes).contains(&cpu.free_bytes)));
    }
}
