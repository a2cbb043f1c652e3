//! The processors that this process may use, and which of them are near to the same memory.
//!
//! On a machine with several sockets a thread reads the memory of another one over the link between them, and each token
//! reads all weights. Processors form one group where they share a NUMA node or a socket, however many nodes a socket is
//! cut into: what a machine does not tell keeps them together. One worker for each group, which has its weights and its
//! KV cells there, reads nothing over the link. Absent: which workers there are ([`crate::version`], [`crate::gates`]).

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors {
    /// How many may compute at once, which a quota may make fewer than there are in the groups.
    count: u32,
    /// Their numbers, the largest group first.
    groups: Vec<Vec<u32>>,
    /// Whether they have Advanced Matrix Extensions, for which weights are laid out in a way that takes more memory.
    amx: bool,
}

impl Processors {
    /// Those of this process, as they were when it first asked.
    #[must_use]
    pub fn here() -> &'static Self {
        static HERE: OnceLock<Processors> = OnceLock::new();
        HERE.get_or_init(|| {
            let count = std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
            match usable() {
                Ok(usable) => Self::read_under(Path::new("/"), &usable, count),
                Err(error) => {
                    tracing::warn!(%error, "which processors may be used is not known: they are taken to be alike");
                    Self::alike(count)
                }
            }
        })
    }

    /// So many of one group.
    #[must_use]
    pub fn alike(count: u32) -> Self {
        Self { count, groups: vec![(0..count).collect()], amx: false }
    }

    /// As [`Self::here`], of the processors `usable`, with `sys` under `root`.
    fn read_under(root: &Path, usable: &[u32], count: u32) -> Self {
        let amx = fs::read_to_string(root.join("proc/cpuinfo")).is_ok_and(|text| has_amx(&text));
        let nodes = nodes(&root.join("sys/devices/system/node"));
        let node = |processor: u32| nodes.iter().position(|processors| processors.contains(&processor));
        let socket = |processor: u32| {
            let path = format!("sys/devices/system/cpu/cpu{processor}/topology/physical_package_id");
            fs::read_to_string(root.join(path)).ok()?.trim().parse::<u32>().ok()
        };
        let mut groups: Vec<Group> = Vec::new();
        for &processor in usable {
            let mut group =
                Group { processors: vec![processor], nodes: vec![node(processor)], sockets: vec![socket(processor)] };
            // It may be the first to belong to several of them.
            for near in groups.extract_if(.., |other| other.is_near(&group)).collect::<Vec<_>>() {
                group.processors.extend(near.processors);
                group.nodes.extend(near.nodes);
                group.sockets.extend(near.sockets);
            }
            group.processors.sort_unstable();
            group.nodes.sort_unstable();
            group.nodes.dedup();
            group.sockets.sort_unstable();
            group.sockets.dedup();
            groups.push(group);
        }
        Self { amx, ..Self::of_groups(count, groups.into_iter().map(|group| group.processors).collect()) }
    }

    /// Those of these groups, of which so many may compute at once.
    pub(crate) fn of_groups(count: u32, mut groups: Vec<Vec<u32>>) -> Self {
        groups.sort_by_key(|processors| (Reverse(processors.len()), processors.first().copied()));
        Self { count, groups, amx: false }
    }

    /// How many may compute at once.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Whether they have AMX, which a worker computes with where it has the variant `sapphirerapids`.
    #[must_use]
    pub fn amx(&self) -> bool {
        self.amx
    }

    /// The numbers of those that are near to the same memory, the largest group first.
    #[must_use]
    pub fn groups(&self) -> &[Vec<u32>] {
        &self.groups
    }
}

/// Whether the kernel tells of AMX in `/proc/cpuinfo`.
fn has_amx(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|line| line.split_whitespace().any(|flag| flag == "amx_int8"))
}

/// A group as it is found, with what its processors belong to; `None` is what the machine does not tell.
struct Group {
    processors: Vec<u32>,
    nodes: Vec<Option<usize>>,
    sockets: Vec<Option<u32>>,
}

impl Group {
    fn is_near(&self, other: &Self) -> bool {
        self.nodes.iter().any(|node| other.nodes.contains(node))
            || self.sockets.iter().any(|socket| other.sockets.contains(socket))
    }
}

/// The processors of each node in a folder of them.
fn nodes(folder: &Path) -> Vec<Vec<u32>> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok());
    let folders = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_node));
    folders.filter_map(|entry| ranges(&fs::read_to_string(entry.path().join("cpulist")).ok()?)).collect()
}

/// The numbers of a list as the kernel writes it: `0-3,8,10-11`. `None`: it is none.
fn ranges(list: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<u32>().ok()?..=last.parse().ok().filter(|&last| last < MAX_PROCESSORS)?);
    }
    Some(numbers)
}

/// The kernel's own limit on the numbers of processors in a set of that size, and ours.
const MAX_PROCESSORS: u32 = CpuSet::MAX_CPU as u32;

/// The processors that this thread may run on.
fn usable() -> io::Result<Vec<u32>> {
    let set = sched_getaffinity(None)?;
    Ok((0..MAX_PROCESSORS).filter(|&processor| set.is_set(processor as usize)).collect())
}

/// Has this thread, and those that it starts from now on, run on these processors alone.
///
/// # Errors
/// None of them may be used, or one is no number of a processor.
pub fn keep_to(processors: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &processor in processors {
        if processor >= MAX_PROCESSORS {
            let message = format!("there is no processor {processor}: numbers end at {}", MAX_PROCESSORS - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        set.set(processor as usize);
    }
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A machine whose processors are of these (node, socket), as its kernel tells it.
    fn machine(processors: &[(u32, u32)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: String, text: String| {
            let path = root.path().join("sys/devices/system").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (processor, (node, socket)) in processors.iter().enumerate() {
            write(format!("cpu/cpu{processor}/topology/physical_package_id"), format!("{socket}\n"));
            let of_node = processors.iter().enumerate().filter(|(_, (other, _))| other == node);
            let list: Vec<String> = of_node.map(|(processor, _)| processor.to_string()).collect();
            write(format!("node/node{node}/cpulist"), format!("{}\n", list.join(",")));
        }
        write("node/possible".to_owned(), "0-1\n".to_owned());
        root
    }

    fn groups(processors: &[(u32, u32)], usable: &[u32]) -> Vec<Vec<u32>> {
        Processors::read_under(machine(processors).path(), usable, 1).groups
    }

    #[test]
    fn processors_of_a_socket_or_of_a_node_are_one_group() {
        let all = [0, 1, 2, 3, 4, 5];
        // Two sockets of a node each, whose numbers alternate.
        let two = [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1)];
        assert_eq!(groups(&two, &all), [vec![0, 2, 4], vec![1, 3, 5]]);
        // Two sockets of several nodes each.
        let cut = [(0, 0), (1, 0), (2, 1), (3, 1), (2, 1), (3, 1)];
        assert_eq!(groups(&cut, &all), [vec![2, 3, 4, 5], vec![0, 1]]);
        // A virtual machine with a socket for each of its processors and one node.
        let virtual_machine = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)];
        assert_eq!(groups(&virtual_machine, &all), [all.to_vec()]);
        // The last one belongs to what looked like two.
        assert_eq!(groups(&[(0, 0), (1, 1), (0, 1)], &[0, 1, 2]), [vec![0, 1, 2]]);
        // Of which not all may be used.
        assert_eq!(groups(&two, &[0, 2, 4]), [vec![0, 2, 4]]);
        assert_eq!(groups(&two, &[0, 1, 3]), [vec![1, 3], vec![0]]);
    }

    #[test]
    fn what_a_machine_does_not_tell_keeps_its_processors_together() {
        let nothing = tempfile::tempdir().unwrap();
        let told = Processors::read_under(nothing.path(), &[0, 1, 2], 2);
        assert_eq!(told, Processors { count: 2, groups: vec![vec![0, 1, 2]], amx: false });
        let root = machine(&[(0, 0), (1, 1)]);
        fs::write(root.path().join("sys/devices/system/node/node1/cpulist"), "1-x\n").unwrap();
        assert_eq!(Processors::read_under(root.path(), &[0, 1], 2).groups, [vec![0], vec![1]]);
        fs::remove_file(root.path().join("sys/devices/system/cpu/cpu1/topology/physical_package_id")).unwrap();
        fs::remove_file(root.path().join("sys/devices/system/cpu/cpu0/topology/physical_package_id")).unwrap();
        assert_eq!(Processors::read_under(root.path(), &[0, 1], 2).groups, [vec![0, 1]]);
    }

    #[test]
    fn amx_is_found_among_the_flags_of_a_processor() {
        let root = machine(&[(0, 0)]);
        fs::create_dir_all(root.path().join("proc")).unwrap();
        for (flags, amx) in [
            ("flags\t\t: fpu avx512_fp16 amx_bf16 amx_tile amx_int8 arch_capabilities", true),
            ("flags\t\t: fpu avx512_bf16", false),
            ("Features\t: fp asimd i8mm", false),
        ] {
            let text = format!("processor\t: 0\nmodel name\t: one with amx_int8\n{flags}\nbugs\t\t:\n");
            fs::write(root.path().join("proc/cpuinfo"), text).unwrap();
            assert_eq!(Processors::read_under(root.path(), &[0], 1).amx(), amx, "{flags}");
        }
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(ranges("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(ranges("\n"), Some(Vec::new()));
        for list in ["a", "1-", "-1", "0-4294967295", "3,,x"] {
            assert_eq!(ranges(list), None, "{list}");
        }
    }

    #[test]
    fn a_thread_keeps_to_the_processors_that_it_is_given() {
        let here = usable().unwrap();
        assert!(Processors::here().count() as usize <= here.len());
        let last = here[here.len() - 1];
        // A thread of its own: the others of the test go on as they are.
        let kept = std::thread::spawn(move || {
            keep_to(&[last]).unwrap();
            std::thread::spawn(usable).join().unwrap().unwrap()
        });
        assert_eq!(kept.join().unwrap(), [last]);
        let refused = std::thread::spawn(|| keep_to(&[MAX_PROCESSORS])).join().unwrap().unwrap_err();
        assert!(refused.to_string().starts_with("there is no processor 1024"), "{refused}");
        assert!(std::thread::spawn(|| keep_to(&[])).join().unwrap().is_err());
    }
}
