//! The benchmark: gantry-server and llama.cpp's llama-server, in turn, under the same loads.
//!
//! [`loads`] says what is measured and what is to be reached; [`peer`] how the other server is configured; [`bench`] is
//! the course of a run. Beneath: [`server`] (a process that is started and stopped), [`drive`] (how requests are sent),
//! [`figures`] (what is made of the answers), [`client`] (one streamed request), [`prompts`] (what is asked),
//! [`processes`] (what it costs). Above: [`results`], and what is made of them, [`table`] and [`plot`].
//!
//! Beside it: [`soak`], which asks one server for everything while it is disturbed, and checks every answer.
//!
//! Absent: pinning to cores (what is measured is what the scheduler makes of it, the client's share included), and
//! retries. `docs/performance.md` says how to run it and how to read it; `hack/bench.sh` builds what it needs.

pub mod bench;
pub mod client;
pub mod drive;
pub mod figures;
pub mod loads;
pub mod machine;
pub mod peer;
pub mod plot;
pub mod processes;
pub mod prompts;
pub mod report;
pub mod results;
pub mod server;
pub mod soak;
pub mod sse;
pub mod stats;
pub mod table;
