//! What a finding is.

use serde::Serialize;

use crate::machine::quoted;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A device reaches memory that it should not, or the IOMMU does not work.
    Critical,
    /// Something does not work as it was meant, or may break.
    Warning,
    /// Something that may be better.
    Notice,
}

impl Severity {
    pub fn name(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
            Self::Notice => "notice",
        }
    }
}

/// What to do, and the commands that do it, one after another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    pub say: String,
    pub commands: Vec<String>,
}

/// Something that an administrator should know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its kind, by which programs know it.
    pub id: &'static str,
    pub severity: Severity,
    pub devices: Vec<String>,
    pub what: String,
    /// What it means.
    pub means: String,
    /// How much it costs, or what it exposes.
    pub costs: String,
    pub next: Vec<Step>,
}

impl Finding {
    pub fn new(id: &'static str, severity: Severity, what: impl Into<String>) -> Self {
        let (devices, next) = (Vec::new(), Vec::new());
        Self { id, severity, devices, what: what.into(), means: String::new(), costs: String::new(), next }
    }

    pub fn of(mut self, devices: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.devices = devices.into_iter().map(Into::into).collect();
        self
    }

    pub fn means(mut self, text: impl Into<String>) -> Self {
        self.means = text.into();
        self
    }

    pub fn costs(mut self, text: impl Into<String>) -> Self {
        self.costs = text.into();
        self
    }

    /// Adds a command.
    pub fn run(mut self, say: impl Into<String>, command: impl Into<String>) -> Self {
        self.next.push(Step { say: say.into(), commands: vec![command.into()] });
        self
    }

    /// Adds commands of which each takes what the one before has done.
    pub fn run_all(mut self, say: impl Into<String>, commands: Vec<String>) -> Self {
        self.next.push(Step { say: say.into(), commands });
        self
    }

    /// Adds what no command does.
    pub fn then(mut self, say: impl Into<String>) -> Self {
        self.next.push(Step { say: say.into(), commands: Vec::new() });
        self
    }

    pub fn steps(mut self, steps: Vec<Step>) -> Self {
        self.next.extend(steps);
        self
    }
}

/// What writes a word to a file of sysfs.
pub fn write(word: &str, path: &str) -> String {
    format!("echo {} | sudo tee {}", quoted(word), quoted(path))
}
