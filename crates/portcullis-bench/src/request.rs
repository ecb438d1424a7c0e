//! What a benchmark is asked for, and why it may not begin.

use std::path::PathBuf;

use portcullis_trace::replay::ProfileError;

use crate::rival::RivalError;
use crate::runner::{Failure, Options};
use crate::team::TeamError;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Request {
    /// Workloads by name, in any order; empty for all.
    pub workloads: Vec<String>,
    /// Subjects by name, in any order; empty for all that are measured without being named (Linux's only with
    /// a `rival`).
    pub subjects: Vec<String>,
    /// Numbers of threads; empty for those with which each workload makes sense.
    pub threads: Vec<usize>,
    /// The shared library that holds Linux's code.
    pub rival: Option<PathBuf>,
    /// How much to measure.
    pub options: Options,
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A name that nothing has.
    #[error("no {kind} {name:?}; there are {}", names.join(", "))]
    NoSuch {
        /// What was to be chosen: a workload, a subject, ...
        kind: &'static str,
        /// What was asked for.
        name: String,
        /// What there is.
        names: Vec<&'static str>,
    },
    /// Linux's code was asked for, but not where it is.
    #[error("the subject `linux` needs the shared library that holds it")]
    NoRival,
    /// Linux's code cannot be used.
    #[error(transparent)]
    Rival(#[from] RivalError),
    /// The hardware to measure against is not known.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// There are no threads to measure with.
    #[error(transparent)]
    Team(#[from] TeamError),
    /// Not even the machine's limits could be measured.
    #[error("the machine's limits cannot be measured: {0}")]
    Limits(Failure),
}

/// Of `all`, those whose name is among `wanted`, in the order of `all`; where nothing is wanted in particular,
/// those that are `default`.
pub(crate) fn choose<T>(
    kind: &'static str,
    all: impl IntoIterator<Item = T>,
    name: impl Fn(&T) -> &'static str,
    wanted: &[String],
    default: impl Fn(&T) -> bool,
) -> Result<Vec<T>, BenchError> {
    let all: Vec<T> = all.into_iter().collect();
    if let Some(missing) = wanted.iter().find(|wanted| all.iter().all(|item| name(item) != **wanted)) {
        return Err(BenchError::NoSuch {
            kind,
            name: missing.clone(),
            names: all.iter().map(name).collect(),
        });
    }
    let chosen =
        |item: &T| if wanted.is_empty() { default(item) } else { wanted.iter().any(|w| w == name(item)) };
    Ok(all.into_iter().filter(chosen).collect())
}
