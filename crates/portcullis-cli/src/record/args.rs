//! What can be asked of a recording, and of the live view.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct Record {
    /// How long to record [default: until the command ends, or Ctrl-C]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: Option<u64>,

    /// Only the mappings of this device, or of those that end so behind a colon, such as 03.0: the kernel leaves out the
    /// others, and all events of the IOMMU, which do not name a device
    #[arg(long, value_name = "NAME", value_parser = device)]
    pub device: Option<String>,

    /// The file to write, which must not exist yet: zstd if its name ends in .zst, plain text otherwise; `-` for standard output
    /// [default: dma-DATE-TIME.trace.zst, or standard output where that is a pipe]
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Take out at once what is private, as `portcullis anonymize` does
    #[arg(long)]
    pub anonymize: bool,

    /// Replay the recording once it is written: the verdict for this machine, in one command
    #[arg(long)]
    pub replay: bool,

    /// Record while this command runs, and return its exit code
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Watch {
    /// How long to watch [default: until Ctrl-C]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: Option<u64>,

    /// Seconds between two views
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub interval: u64,

    /// Only this device, or those that end so behind a colon, such as 03.0
    #[arg(long, value_name = "NAME", value_parser = device)]
    pub device: Option<String>,
}

/// A device's name, or its end. It becomes a part of a filter of the kernel's, so it is letters, digits and what names have besides.
fn device(text: &str) -> Result<String, String> {
    let is_one = |byte: u8| byte.is_ascii_alphanumeric() || b".:_-".contains(&byte);
    if !text.is_empty() && text.len() <= 64 && text.bytes().all(is_one) {
        Ok(text.to_owned())
    } else {
        Err("expected a device, or the end of its name, such as 0000:00:03.0 or 03.0".into())
    }
}

#[cfg(test)]
mod tests {
    use super::device;

    #[test]
    fn a_device_is_no_expression_of_the_kernel_s() {
        for good in ["03.0", "0000:00:03.0", "platform-dev_1"] {
            assert_eq!(device(good).as_deref(), Ok(good));
        }
        for bad in ["", "a\"", "a b", "*", "a\n", "a||b", &"a".repeat(65)] {
            assert!(device(bad).is_err(), "{bad}");
        }
    }
}
