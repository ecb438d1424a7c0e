//! Who is measured.

use std::path::Path;
use std::sync::Arc;

use portcullis::std_platform::StdPlatform;

use super::format::AnyFormat;
use super::linux::{Kernel, Library};
use super::memory;
use super::table::Measured;
use super::work::Pattern;
use crate::rival::RivalError;
use crate::runner::Failure;

/// A subject's name and what to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubjectInfo {
    /// Its name, as in reports.
    pub name: &'static str,
    /// What it is.
    pub about: &'static str,
    /// When it is measured without being named.
    pub(crate) default: ByDefault,
    which: Which,
}

/// When a subject is measured without being named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ByDefault {
    Always,
    /// With memory that is not coherent.
    Incoherent,
    Never,
}

/// What of ours is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ours {
    Engine { coherent: bool },
    Locked,
    Stores { coherent: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Ours(Ours),
    Linux { kernel: Kernel, coherent: bool },
}

impl SubjectInfo {
    const fn new(name: &'static str, about: &'static str, default: ByDefault, which: Which) -> Self {
        Self { name, about, default, which }
    }

    /// Whether it needs the library with Linux's code.
    pub(crate) fn is_linux(&self) -> bool {
        matches!(self.which, Which::Linux { .. })
    }

    fn coherent(&self) -> bool {
        match self.which {
            Which::Ours(Ours::Engine { coherent } | Ours::Stores { coherent }) => coherent,
            Which::Ours(Ours::Locked) => true,
            Which::Linux { coherent, .. } => coherent,
        }
    }
}

const fn linux(kernel: Kernel, coherent: bool) -> Which {
    Which::Linux { kernel, coherent }
}

/// All subjects, in the order in which they are reported.
pub const SUBJECTS: [SubjectInfo; 8] = [
    SubjectInfo::new(
        "portcullis",
        "PageTable: no lock",
        ByDefault::Always,
        Which::Ours(Ours::Engine { coherent: true }),
    ),
    SubjectInfo::new(
        "stores",
        "the limit: the same entries are stored (or loaded) in place, without a walk or a look at what is there",
        ByDefault::Always,
        Which::Ours(Ours::Stores { coherent: true }),
    ),
    SubjectInfo::new("locked", "PageTable behind one lock", ByDefault::Always, Which::Ours(Ours::Locked)),
    SubjectInfo::new(
        "linux",
        "the newest kernel's code in the library given with --rival; a list is mapped piece by piece",
        ByDefault::Always,
        linux(Kernel::Newest, true),
    ),
    SubjectInfo::new(
        "linux-6.12",
        "Linux 6.12's code in that library, Arm's formats alone",
        ByDefault::Never,
        linux(Kernel::V6_12, true),
    ),
    SubjectInfo::new(
        "portcullis-nc",
        "PageTable whose changes are written back from the caches, for a walker that does not look there",
        ByDefault::Incoherent,
        Which::Ours(Ours::Engine { coherent: false }),
    ),
    SubjectInfo::new(
        "stores-nc",
        "stores that are written back, each operation's lines together",
        ByDefault::Incoherent,
        Which::Ours(Ours::Stores { coherent: false }),
    ),
    SubjectInfo::new(
        "linux-nc",
        "the newest kernel's code for a walker that does not look into the caches",
        ByDefault::Incoherent,
        linux(Kernel::Newest, false),
    ),
];

/// What makes tables.
pub(crate) struct Maker {
    library: Option<Library>,
    platform: StdPlatform,
}

impl Maker {
    pub(crate) fn new(rival: Option<&Path>) -> Result<Self, RivalError> {
        // One platform for all tables, as in a program: a thread that had used several would have to look for
        // its CPU among them.
        Ok(Self { library: rival.map(Library::open).transpose()?, platform: StdPlatform::new() })
    }

    /// Empty tables of a subject, for the work of `pattern`.
    pub(crate) fn tables(
        &self,
        subject: &SubjectInfo,
        format: &dyn AnyFormat,
        pattern: &Pattern,
    ) -> Result<Arc<dyn Measured>, Failure> {
        if !subject.coherent() && !memory::can_write_back() {
            return Err(Failure::Unsupported("this machine has no CLFLUSHOPT".into()));
        }
        match (subject.which, &self.library) {
            (Which::Ours(ours), _) => format.open(ours, &self.platform, pattern),
            (Which::Linux { kernel, coherent }, Some(library)) => {
                library.tables(format.name(), kernel, coherent)
            }
            (Which::Linux { .. }, None) => Err(Failure::Unsupported("there is no library".into())),
        }
    }
}
