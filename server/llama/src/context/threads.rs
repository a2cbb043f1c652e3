//! Threads that live as long as the contexts which use them. Without them ggml makes and joins its threads for every graph.

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use llama_cpp_sys_2 as sys;

/// How long a thread spins for the next graph before it sleeps, in ggml's units (0 to 100); 50 is ggml's own choice.
/// Tokens/s of demo-v2 on two threads, two cores that 15 other processes wanted, three runs each, one context (two):
/// no pool 0.9 to 1.2 (0 to 1.3), asleep at once 1.4 to 2.2 (0 to 6), 5: 3 to 7 (4 to 8), 50: 2 to 27 (4 to 19).
/// One thread gave 87 there: threads beyond the cores that are free cost more than any of this.
const POLL: u32 = 50;

type Free = unsafe extern "C" fn(*mut sys::ggml_threadpool);

/// A pool of the CPU backend.
#[derive(Debug)]
pub(super) struct ThreadPool {
    ptr: NonNull<sys::ggml_threadpool>,
    free: Free,
    /// Held by who computes.
    turn: Mutex<()>,
}

// SAFETY: its functions are bound to no thread.
unsafe impl Send for ThreadPool {}
// SAFETY: it computes one graph at a time, which is what `turn` is for.
unsafe impl Sync for ThreadPool {}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        // SAFETY: owned, and the contexts that used it are gone: `Context` frees its own before its fields.
        unsafe { (self.free)(self.ptr.as_ptr()) };
    }
}

impl ThreadPool {
    /// Starts the threads. `None` where there is nothing to keep (one thread computes by
    /// itself) or the CPU backend has no pools: ggml then makes its threads as it needs them.
    pub(super) fn new(threads: u32) -> Option<Self> {
        if threads < 2 {
            return None;
        }
        // The CPU backend may be a library loaded at run time, so its functions are asked for by name.
        let new = proc_address(c"ggml_threadpool_new")?;
        let free = proc_address(c"ggml_threadpool_free")?;
        // SAFETY: the functions of these names in the pinned ggml have these types.
        let (new, free) = unsafe {
            (
                std::mem::transmute::<
                    NonNull<std::ffi::c_void>,
                    unsafe extern "C" fn(*mut sys::ggml_threadpool_params) -> *mut sys::ggml_threadpool,
                >(new),
                std::mem::transmute::<NonNull<std::ffi::c_void>, Free>(free),
            )
        };
        // SAFETY: plain data out; the caller checked the number.
        let mut params = unsafe { sys::ggml_threadpool_params_default(i32::try_from(threads).unwrap_or(1)) };
        params.poll = POLL;
        // SAFETY: `params` outlives the call.
        let ptr = NonNull::new(unsafe { new(&raw mut params) })?;
        Some(Self { ptr, free, turn: Mutex::new(()) })
    }

    /// Gives them to a context, which keeps this as long as it lives, uses no more threads than there are, and computes in
    /// its turn.
    pub(super) fn attach(&self, context: NonNull<sys::llama_context>) {
        // SAFETY: both are alive, and the pool outlives the context.
        unsafe { sys::llama_attach_threadpool(context.as_ptr(), self.ptr.as_ptr(), std::ptr::null_mut()) };
    }

    /// Waits until nobody else computes with them.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn proc_address(name: &CStr) -> Option<NonNull<std::ffi::c_void>> {
    // SAFETY: these read the registry of backends, which is complete since llama.cpp was initialised; each answers null
    // where there is nothing, and the name ends with NUL.
    unsafe {
        let device = sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU);
        let registry = (!device.is_null()).then(|| sys::ggml_backend_dev_backend_reg(device))?;
        if registry.is_null() {
            return None;
        }
        NonNull::new(sys::ggml_backend_reg_get_proc_address(registry, name.as_ptr()))
    }
}
