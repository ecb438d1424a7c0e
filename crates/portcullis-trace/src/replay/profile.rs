//! Hardware profiles: the library's waits on a given machine, each figure with its source.

use portcullis::invalidation::Costs;
use serde::{Deserialize, Serialize};

use crate::input;
use crate::printable::{Printable, PrintableLines};

/// A figure and its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Nanoseconds, not negative.
    pub ns: f64,
    /// Who measured it, or why it is assumed.
    pub source: String,
}

/// The hardware's waits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Waits {
    /// Ringing the doorbell: once a submission.
    pub doorbell: Cost,
    /// From then until the confirmation: once a submission.
    pub completion: Cost,
    /// Each invalidation descriptor of a submission, additionally.
    pub descriptor: Cost,
    /// Each map request, if mapping is by requests (virtualised and user-space IOMMUs).
    pub map_request: Cost,
    /// Each granule mapped by request.
    pub map_page: Cost,
    /// Each granule unmapped by request.
    pub unmap_page: Cost,
}

impl Waits {
    /// The costs of invalidations, as a driver of such hardware reports them. (Profiles leave out cache refills: the CPU does not wait for
    /// them.)
    pub fn costs(&self) -> Costs {
        // Checked when the profile was read: each at most a second.
        let ns = |ns: f64| ns.ceil() as u32;
        Costs {
            submission_ns: ns(self.doorbell.ns + self.completion.ns),
            request_ns: ns(self.descriptor.ns),
            ..Costs::BARE_METAL
        }
    }

    /// Every cost with its name in the file, and its meaning.
    pub fn named(&self) -> [(&'static str, &'static str, &Cost); 6] {
        [
            ("waits.doorbell", "doorbell, per submission", &self.doorbell),
            ("waits.completion", "completion, per submission", &self.completion),
            ("waits.descriptor", "per invalidation descriptor", &self.descriptor),
            ("waits.map_request", "per map request", &self.map_request),
            ("waits.map_page", "per page mapped by request", &self.map_page),
            ("waits.unmap_page", "per page unmapped by request", &self.unmap_page),
        ]
    }
}

/// The hardware's translation caches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Caches {
    /// Translations in the IOTLB.
    pub iotlb_entries: usize,
    /// Ways of a set.
    pub iotlb_ways: usize,
    /// Pointers to tables, for each level.
    pub walk_cache_entries: usize,
    /// Whether the leaf-only hint keeps the pointers to tables.
    pub honours_leaf_only: bool,
    /// The largest range of one descriptor is 2^this granules; a larger one becomes the domain.
    pub max_address_mask: u32,
    /// Their source.
    pub source: String,
}

/// A machine that a replay assumes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name for `--profile`.
    pub name: String,
    /// A description of the machine.
    pub about: String,
    /// Its page-table format, one of [`FORMATS`](super::FORMATS); the first of these by default.
    pub format: Option<String>,
    /// Its waits.
    pub waits: Waits,
    /// Its caches.
    pub caches: Caches,
}

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// Neither a built-in profile nor a file.
    #[error("no profile {name:?}: there are {}, or name a TOML file", built_in_names().join(", "))]
    Unknown {
        /// The requested name.
        name: String,
    },
    /// The file cannot be read.
    #[error("profile {}: {source}", Printable(path))]
    Io {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not a profile.
    #[error("profile {} is not a profile: {}", Printable(path), PrintableLines(source))]
    Parse {
        /// The file.
        path: String,
        /// The parser's error.
        source: Box<toml::de::Error>,
    },
    /// An impossible figure.
    #[error("profile {}: {what} is {value}, expected {expected}", Printable(path))]
    Figure {
        /// The file.
        path: String,
        /// The figure.
        what: &'static str,
        /// Its value.
        value: f64,
        /// The allowed values.
        expected: &'static str,
    },
}

/// The most entries of an IOTLB, and of each level of a walk cache.
const MOST_ENTRIES: usize = 1 << 16;

/// The most ways of a set, all of which are examined for each access.
const MOST_WAYS: usize = 256;

const BUILT_IN: [(&str, &str); 4] = [
    ("none", include_str!("../../profiles/none.toml")),
    ("vtd", include_str!("../../profiles/vtd.toml")),
    ("smmuv3", include_str!("../../profiles/smmuv3.toml")),
    ("virtio-iommu", include_str!("../../profiles/virtio-iommu.toml")),
];

/// The names of the built-in profiles.
pub fn built_in_names() -> Vec<&'static str> {
    BUILT_IN.iter().map(|(name, _)| *name).collect()
}

/// The text of the built-in profile `name`; `None` if there is none.
pub fn built_in_text(name: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(built_in, _)| *built_in == name).map(|(_, text)| *text)
}

impl Profile {
    /// The built-in profile `name`, or else the TOML file there.
    ///
    /// # Errors
    /// [`ProfileError`] names the file and the fault.
    pub fn load(name: &str) -> Result<Self, ProfileError> {
        if let Some(text) = built_in_text(name) {
            return Self::parse(name, text);
        }
        if !name.contains(['.', '/', '\\']) {
            return Err(ProfileError::Unknown { name: name.into() });
        }
        let text = input::settings(name).map_err(|source| ProfileError::Io { path: name.into(), source })?;
        Self::parse(name, &text)
    }

    /// Parses a profile in TOML; messages call it `path`.
    ///
    /// # Errors
    /// [`ProfileError`] names the fault.
    pub fn parse(path: &str, text: &str) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text)
            .map_err(|source| ProfileError::Parse { path: path.into(), source: Box::new(source) })?;
        let bad =
            |what, value, expected| Err(ProfileError::Figure { path: path.into(), what, value, expected });
        for (what, _, cost) in profile.waits.named() {
            if !(0.0..=1e9).contains(&cost.ns) {
                return bad(what, cost.ns, "0 to 1,000,000,000 ns");
            }
        }
        let caches = &profile.caches;
        for (what, entries, most, expected) in [
            ("caches.iotlb_entries", caches.iotlb_entries, MOST_ENTRIES, "1 to 65,536"),
            ("caches.iotlb_ways", caches.iotlb_ways, MOST_WAYS, "1 to 256"),
            ("caches.walk_cache_entries", caches.walk_cache_entries, MOST_ENTRIES, "1 to 65,536"),
        ] {
            if !(1..=most).contains(&entries) {
                return bad(what, entries as f64, expected);
            }
        }
        if caches.iotlb_ways > caches.iotlb_entries {
            return bad("caches.iotlb_ways", caches.iotlb_ways as f64, "no more ways than entries");
        }
        if caches.max_address_mask > 36 {
            return bad("caches.max_address_mask", caches.max_address_mask.into(), "0 to 36");
        }
        Ok(profile)
    }
}
