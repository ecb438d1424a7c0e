//! The guest's first file system: an archive of `cpio`'s format "newc", as Linux takes it. Several may follow each other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes by which each part of an archive is aligned.
const ALIGNED: usize = 4;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTERS: u32 = 0o020_600;

/// An archive.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    folders: BTreeSet<String>,
    count: u32,
}

impl Archive {
    /// Adds a file that anybody may run, and the folders in which it lies.
    pub fn add(&mut self, path: &str, content: &[u8]) {
        let path = path.trim_start_matches('/');
        let above: Vec<usize> = path.match_indices('/').map(|(at, _)| at).collect();
        for at in above {
            if self.folders.insert(path[..at].to_owned()) {
                self.entry(&path[..at], FOLDER, (0, 0), &[]);
            }
        }
        self.entry(path, PROGRAM, (0, 0), content);
    }

    /// Adds a file of this machine.
    pub fn add_file(&mut self, path: &str, from: &Path) -> Result<(), String> {
        let content = std::fs::read(from).map_err(|error| format!("{}: {error}", from.display()))?;
        self.add(path, &content);
        Ok(())
    }

    /// Adds what the kernel opens before there is a `/dev`.
    pub fn add_console(&mut self) {
        self.folders.insert("dev".to_owned());
        self.entry("dev", FOLDER, (0, 0), &[]);
        self.entry("dev/console", CHARACTERS, (5, 1), &[]);
    }

    /// The whole archive.
    pub fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.count += 1;
        let (size, name) = (content.len() as u32, path.len() as u32 + 1);
        // inode, mode, owner, group, links, time, size, device of the file system, device that it is, name's length, no sum
        let fields = [self.count, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name, 0];
        self.bytes.extend(b"070701");
        fields.iter().for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(path.bytes().chain([0]));
        self.align();
        self.bytes.extend(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNED), 0);
    }
}

/// The modules of a kernel, by their names.
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
}

impl Modules {
    /// All below a folder.
    pub fn find(folder: &Path) -> Result<Self, String> {
        let mut files = BTreeMap::new();
        let mut folders = vec![folder.to_path_buf()];
        while let Some(folder) = folders.pop() {
            let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
            for entry in std::fs::read_dir(&folder).map_err(failed)? {
                let path = entry.map_err(failed)?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path);
                } else if let Some((module, "ko" | "ko.xz")) = name.split_once('.') {
                    files.insert(module.replace('-', "_"), path);
                }
            }
        }
        Ok(Self { files })
    }

    /// Adds modules, each with all that it depends on: their files to `/mods`, and for each a list of files in the order in which they
    /// are loaded. One that the kernel has built in, or has not, has no list.
    pub fn add(&self, archive: &mut Archive, wanted: &[&str]) -> Result<(), String> {
        let mut read = BTreeMap::new();
        for &name in wanted {
            let mut list = Vec::new();
            self.load(name, &mut list, &mut read)?;
            if !list.is_empty() {
                let lines: Vec<String> = list.iter().map(|module| format!("{module}.ko\n")).collect();
                archive.add(&format!("mods/{name}.list"), lines.concat().as_bytes());
            }
        }
        read.iter().for_each(|(module, content)| archive.add(&format!("mods/{module}.ko"), content));
        Ok(())
    }

    fn load(
        &self,
        name: &str,
        list: &mut Vec<String>,
        read: &mut BTreeMap<String, Vec<u8>>,
    ) -> Result<(), String> {
        let Some(path) = self.files.get(name) else { return Ok(()) };
        if list.iter().any(|listed| listed == name) {
            return Ok(());
        }
        if !read.contains_key(name) {
            read.insert(name.to_owned(), content(path)?);
        }
        for below in needs(&read[name]) {
            self.load(&below, list, read)?;
        }
        list.push(name.to_owned());
        Ok(())
    }
}

fn content(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if path.extension().is_none_or(|end| end != "xz") {
        return std::fs::read(path).map_err(failed);
    }
    let out = Command::new("xz").arg("-dc").arg(path).output().map_err(failed)?;
    if out.status.success() {
        Ok(out.stdout)
    } else {
        Err(format!("xz -dc {}: {}", path.display(), out.status))
    }
}

/// The modules that one says it depends on: a string of its section `.modinfo`.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let rest = &module[at + KEY.len()..];
    let value = rest.split(|&byte| byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value).replace('-', "_");
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_linux_takes() {
        let mut archive = Archive::default();
        archive.add("/a/b", b"hello");
        archive.add("a/c", b"");
        let bytes = archive.end();
        let text = String::from_utf8(bytes).unwrap();
        // The folder: number, mode, owner and group, one link, and so on; its name has two bytes with the zero behind it. The header
        // has 110 bytes, and what follows a name begins at a multiple of 4.
        let folder = "07070100000001000041ed0000000000000000000000010000000000000000000000000000000000000000\
                      000000000000000200000000a\x00070701";
        assert!(text.starts_with(folder), "{text:?}");
        assert_eq!(text.matches("070701").count(), 4);
        assert_eq!(text.find("a/b\0").map(|at| (at + 4).next_multiple_of(4)), text.find("hello"));
        assert!(text.len().is_multiple_of(4) && text.contains("TRAILER!!!"));
    }

    #[test]
    fn what_a_module_depends_on_is_read_from_it() {
        assert_eq!(
            needs(b"\x7fELF\0license=GPL\0depends=nvme-core,t10-pi\0name=nvme\0"),
            ["nvme_core", "t10_pi"]
        );
        assert!(needs(b"\x7fELF\0depends=\0").is_empty() && needs(b"").is_empty());
    }
}
