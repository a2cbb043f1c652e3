//! llama.cpp's process-wide state: initialised once, never freed.
//!
//! ggml's backends are part of it. The CPU backend that is linked in needs no file; a directory may bring better ones for
//! this processor, and those of GPUs, as modules ([`modules`] reads it and chooses). They are loaded before anything else
//! of llama.cpp runs, because what looks at a CPU backend once goes on using it.

mod devices;
mod modules;

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use llama_cpp_2::llama_backend::LlamaBackend;
use serde::{Deserialize, Serialize};

use crate::error::BackendError;
use crate::{logs, shim};

pub use devices::{Device, DeviceKind};
pub(crate) use devices::{NamedDevice, offload_devices};
pub use modules::{BACKENDS_VERSION, MAX_MODULES};
use modules::{CpuChoice, Modules};

/// The name of the CPU backend that is linked in.
pub const BUILTIN_CPU: &str = "builtin";

/// The backends of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backends {
    /// The CPU backend: [`BUILTIN_CPU`], or the variant that was loaded, such as `icelake`.
    pub cpu: String,
    /// The instructions that it uses, as it names them.
    pub cpu_features: Vec<String>,
    /// Where modules were looked for.
    pub dir: Option<PathBuf>,
    /// Everything that computes.
    pub devices: Vec<Device>,
    /// Modules that are there and were not taken, with the reason.
    pub not_loaded: Vec<String>,
}

impl Backends {
    /// The GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(|device| matches!(device.kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu))
    }

    /// What there is, in a sentence, for those who look for something else.
    #[must_use]
    pub fn describe(&self) -> String {
        let names: Vec<String> =
            self.devices.iter().map(|device| format!("{} ({})", device.name, device.description)).collect();
        let from = match &self.dir {
            Some(dir) => format!("backends in {}", dir.display()),
            None => String::from("no directory of backends"),
        };
        let mut text = format!("{from}; CPU backend {}; devices: {}", self.cpu, names.join(", "));
        for reason in &self.not_loaded {
            text.push_str("; ");
            text.push_str(reason);
        }
        text
    }
}

struct Process {
    asked: Option<PathBuf>,
    result: Result<(Backends, LlamaBackend), BackendError>,
}

/// Above a row of logits, one of which comes and goes with each token.
const LARGE_BLOCK_BYTES: u32 = 4 << 20;

static PROCESS: OnceLock<Process> = OnceLock::new();

/// Initialises llama.cpp with the CPU backend that is linked in, unless it is initialised, and routes its log to
/// `tracing`. [`Model::load`](crate::Model::load) does this, so calling it is needed only to fail early.
///
/// # Errors
/// The processor cannot run that backend, or another part of the process initialised llama.cpp by itself.
pub fn init() -> Result<&'static Backends, BackendError> {
    process(None).result.as_ref().map(|(backends, _)| backends).map_err(Clone::clone)
}

/// As [`init`], with the backends that `dir` has as well: the best CPU variant for this processor in place of the one that
/// is linked in, and those of GPUs. To be called before everything else, since it happens once in a process.
///
/// The program must export what modules need: see `link_args.rs`.
///
/// # Errors
/// The directory cannot be read, its modules belong to another llama.cpp, no CPU backend runs on this processor, or
/// llama.cpp is initialised already without this directory.
pub fn init_from(dir: &Path) -> Result<&'static Backends, BackendError> {
    let process = process(Some(dir));
    if process.asked.as_deref() != Some(dir) {
        return Err(BackendError::AlreadyInitialised(dir.to_path_buf()));
    }
    process.result.as_ref().map(|(backends, _)| backends).map_err(Clone::clone)
}

/// Has the C library give back to the system what blocks of at least so many bytes took as soon as they are freed, and not
/// keep it for the next ones. What was asked last counts for the whole process; [`init`] asks for the states of sequences,
/// which are tens of megabytes.
pub fn return_large_blocks(bytes: u32) {
    // SAFETY: this sets integers within the C library, which has its own lock.
    unsafe { shim::gantry_return_large_blocks(i32::try_from(bytes).unwrap_or(i32::MAX / 2).min(i32::MAX / 2)) };
}

/// Has the C library give back to the system what it keeps of freed blocks, large and small. Takes milliseconds for each
/// hundred MiB, in which other threads wait for a block.
pub fn return_free_memory() {
    // SAFETY: the C library's own, with its own locks.
    unsafe { shim::gantry_return_free_memory() };
}

/// Where a program's backends are unless it is told: `backends` beside it, or `../lib/gantry`; `None` where neither is.
#[must_use]
pub fn default_dir() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    let library = folder.parent().map(|prefix| prefix.join("lib/gantry"));
    [Some(folder.join("backends")), library].into_iter().flatten().find(|dir| dir.is_dir())
}

fn process(dir: Option<&Path>) -> &'static Process {
    PROCESS.get_or_init(|| Process { asked: dir.map(Path::to_path_buf), result: start(dir) })
}

fn start(dir: Option<&Path>) -> Result<(Backends, LlamaBackend), BackendError> {
    logs::install();
    // SAFETY: this sets an integer; `get_or_init` lets no other thread of ours into llama.cpp before it.
    unsafe { shim::gantry_common_log_off() };
    return_large_blocks(LARGE_BLOCK_BYTES);
    let modules = dir.map(modules::read).transpose()?.unwrap_or_default();
    let Modules { cpu, others, mut not_loaded } = modules;
    let choice = modules::choose(modules::builtin_score(), &cpu);
    let cpu = load_cpu(choice, dir, &mut not_loaded)?;
    for module in &others {
        if let Err(reason) = load(&module.path) {
            not_loaded.push(module.not_loaded(&reason));
        }
    }
    let llama = LlamaBackend::init().map_err(|e| BackendError::Other(e.to_string()))?;
    let backends = Backends {
        cpu,
        cpu_features: devices::cpu_features(),
        dir: dir.map(Path::to_path_buf),
        devices: devices::list(),
        not_loaded,
    };
    tracing::info!(
        cpu = %backends.cpu,
        features = %backends.cpu_features.join(" "),
        "backends: {}",
        backends.describe()
    );
    Ok((backends, llama))
}

/// Puts a CPU backend into the registry, which nothing has used before, and names it.
fn load_cpu(choice: CpuChoice<'_>, dir: Option<&Path>, not_loaded: &mut Vec<String>) -> Result<String, BackendError> {
    let builtin_runs = modules::builtin_score() > 0;
    if let CpuChoice::Module(module) = choice {
        // SAFETY: sets a flag that is read when the registry is made, which is in the next call.
        unsafe { shim::gantry_builtin_cpu(false) };
        match load(&module.path) {
            Ok(()) => return Ok(module.name.clone()),
            Err(reason) => not_loaded.push(module.not_loaded(&reason)),
        }
        if builtin_runs {
            tracing::warn!(module = %module.file, "a CPU backend could not be loaded: {}", not_loaded.join("; "));
            // SAFETY: the processor runs it.
            unsafe { shim::gantry_register_builtin_cpu() };
            return Ok(String::from(BUILTIN_CPU));
        }
    } else if matches!(choice, CpuChoice::Builtin) {
        return Ok(String::from(BUILTIN_CPU));
    }
    Err(BackendError::Processor {
        missing: modules::builtin_missing().join(", "),
        looked: match dir {
            Some(dir) if not_loaded.is_empty() => format!("{} has none that it can run", dir.display()),
            Some(_) => not_loaded.join("; "),
            None => String::from("there is no directory of backends"),
        },
    })
}

fn load(path: &Path) -> Result<(), String> {
    let c_path = c_path(path)?;
    logs::clear_recent_errors();
    // SAFETY: the path is NUL-terminated, and the shim catches exceptions. What the module does when it is loaded is as
    // trusted as the program itself.
    if unsafe { shim::gantry_backend_load(c_path.as_ptr()) } { Ok(()) } else { Err(logs::take_recent_errors()) }
}

fn c_path(path: &Path) -> Result<CString, String> {
    let text = path.to_str().ok_or("its path is not UTF-8")?;
    CString::new(text).map_err(|_| String::from("its path holds a NUL byte"))
}
