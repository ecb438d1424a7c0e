//! A fake kernel below the system calls: its files lie in a folder of the test, and it records each call verbatim. Numbers of calls and
//! structures are from `linux/vfio.h` and `linux/iommufd.h`, independently of the code's crates.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tempfile::TempDir;

#[derive(Debug)]
pub struct State {
    folder: TempDir,
    /// Each call: file, request, and arguments.
    asked: Vec<String>,
    /// Calls that fail, with the code.
    pub fails: Vec<(&'static str, i32)>,
    pub api_version: i32,
    pub has_type1: i32,
    pub group_flags: u32,
    /// iommufd's address ranges, and the bits of page sizes.
    pub ranges: (Vec<(u64, u64)>, u64),
    /// The answer to `VFIO_IOMMU_GET_INFO`.
    pub info: Vec<u8>,
    /// The answer of an unmap; all bytes by default.
    pub unmapped: Option<u64>,
    /// Flags, bytes and offset of each region of a device.
    pub regions: [(u32, u64, u64); 9],
    /// Flags and count of each interrupt index of a device.
    pub irqs: [(u32, u32); 5],
    /// The interrupts left, in its answer to a request for too many.
    pub irqs_left: i32,
    /// Registered eventfds, by index and interrupt.
    events: BTreeMap<(u32, u32), File>,
}

thread_local! {
    static STATE: RefCell<Option<Rc<RefCell<State>>>> = const { RefCell::new(None) };
}

/// Serves the calling thread until it is dropped.
pub struct Kernel(Rc<RefCell<State>>);

impl Drop for Kernel {
    fn drop(&mut self) {
        STATE.take();
    }
}

/// The address ranges of this kernel.
pub const RANGES: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

impl Kernel {
    /// With these files in `/dev`.
    pub fn with(files: &[&str]) -> Self {
        let state = State {
            folder: tempfile::tempdir().unwrap(),
            asked: Vec::new(),
            fails: Vec::new(),
            api_version: 0,
            has_type1: 1,
            group_flags: 1,
            ranges: (RANGES.to_vec(), 4096 | 2 << 20),
            info: super::says::answer(),
            unmapped: None,
            regions: [(0, 0, 0); 9],
            irqs: [(0, 0); 5],
            irqs_left: 0,
            events: BTreeMap::new(),
        };
        let kernel = Self(Rc::new(RefCell::new(state)));
        for file in files {
            let path = kernel.path("dev").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [0; 0x1_0000]).unwrap();
        }
        STATE.set(Some(Rc::clone(&kernel.0)));
        kernel
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.0.borrow().folder.path().join(below)
    }

    pub fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.0.borrow_mut());
    }

    /// Calls since the last time.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.0.borrow_mut().asked)
    }

    /// Raises an interrupt of a device; false if it is off.
    pub fn raise(&self, index: u32, interrupt: u32) -> bool {
        let state = self.0.borrow();
        let event = state.events.get(&(index, interrupt));
        event.is_some_and(|mut event| event.write_all(&1_u64.to_ne_bytes()).is_ok())
    }

    /// Whether this process has that file below `/dev` open, or mapped.
    pub fn is_open(&self, file: &str) -> bool {
        let path = self.path("dev").join(file);
        let mapped = fs::read_to_string("/proc/self/maps").unwrap();
        let mut open = fs::read_dir("/proc/self/fd").unwrap().flatten();
        mapped.contains(path.to_str().unwrap())
            || open.any(|file| fs::read_link(file.path()).is_ok_and(|to| to == path))
    }

    /// A PCI device, with the VFIO file `cdev`, if it has one.
    pub fn device(&self, name: &str, group: u32, cdev: Option<&str>) {
        let devices = self.path("sys/bus/pci/devices");
        device(&devices, name, Some("vfio-pci"), Some(group));
        cdev.into_iter()
            .for_each(|cdev| fs::create_dir_all(devices.join(name).join("vfio-dev").join(cdev)).unwrap());
    }
}

/// A PCI device, as in `/sys` below `devices`.
pub fn device(devices: &Path, name: &str, driver: Option<&str>, group: Option<u32>) {
    let device = devices.join(name);
    fs::create_dir_all(&device).unwrap();
    let link = |from: &str, to: String| symlink(to, device.join(from)).unwrap();
    driver.into_iter().for_each(|driver| link("driver", format!("../drivers/{driver}")));
    group.into_iter().for_each(|group| link("iommu_group", format!("../groups/{group}")));
    group.into_iter().for_each(|group| {
        let members = devices.join(format!("groups/{group}/devices"));
        fs::create_dir_all(&members).unwrap();
        symlink(&device, members.join(name)).unwrap();
    });
}

/// The files of this thread's kernel.
pub fn root() -> Option<PathBuf> {
    STATE.with_borrow(|state| Some(state.as_ref()?.borrow().folder.path().to_owned()))
}

/// Its answer; `None` without a fake kernel.
pub fn answer(file: BorrowedFd<'_>, request: u64, argument: *mut libc::c_void) -> Option<io::Result<i32>> {
    let state = STATE.with_borrow(Option::clone)?;
    let answered = state.borrow_mut().answer(file.as_raw_fd(), request, argument);
    Some(answered.map_err(io::Error::from_raw_os_error))
}

fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

fn whole(halves: &[u32]) -> u64 {
    u64::from(halves[0]) | u64::from(halves[1]) << 32
}

impl State {
    /// The name of an open file, below the folder.
    fn name(&self, file: i32) -> String {
        let path = fs::read_link(format!("/proc/self/fd/{file}")).unwrap();
        path.strip_prefix(self.folder.path()).unwrap().to_string_lossy().into_owned()
    }

    fn answer(&mut self, file: i32, request: u64, argument: *mut libc::c_void) -> Result<i32, i32> {
        assert_eq!(request >> 8, u64::from(b';'), "the letter of VFIO and of iommufd, and no size");
        let file = self.name(file);
        let call = match request & 0xff {
            0x81 => "IOAS_ALLOC",
            0x84 => "IOAS_IOVA_RANGES",
            0x85 => "IOAS_MAP",
            0x86 => "IOAS_UNMAP",
            0x8f => "IOAS_MAP_FILE",
            100 => "GET_API_VERSION",
            101 => "CHECK_EXTENSION",
            102 => "SET_IOMMU",
            103 => "GROUP_GET_STATUS",
            104 => "GROUP_SET_CONTAINER",
            105 => "GROUP_UNSET_CONTAINER",
            106 => "GROUP_GET_DEVICE_FD",
            108 => "DEVICE_GET_REGION_INFO",
            109 => "DEVICE_GET_IRQ_INFO",
            110 => "DEVICE_SET_IRQS",
            111 => "DEVICE_RESET",
            112 => "IOMMU_GET_INFO",
            113 => "IOMMU_MAP_DMA",
            114 => "IOMMU_UNMAP_DMA",
            118 => "DEVICE_BIND_IOMMUFD",
            119 => "DEVICE_ATTACH_IOMMUFD_PT",
            number => panic!("{file}: a call of number {number}"),
        };
        let fails = self.fails.iter().find(|fails| fails.0 == call).map_or(Ok(0), |fails| Err(fails.1));
        let number = argument.addr();
        let note = |state: &mut Self, given: String| state.asked.push(format!("{file}: {call} {given}"));
        match call {
            "GET_API_VERSION"
            | "CHECK_EXTENSION"
            | "SET_IOMMU"
            | "DEVICE_RESET"
            | "GROUP_UNSET_CONTAINER" => {
                note(self, number.to_string());
                return fails.map(|_| match call {
                    "GET_API_VERSION" => self.api_version,
                    "CHECK_EXTENSION" => self.has_type1,
                    _ => 0,
                });
            }
            "GROUP_SET_CONTAINER" => {
                // SAFETY: the call takes the address of a file descriptor.
                let container = self.name(unsafe { *argument.cast::<i32>() });
                note(self, container);
                return fails;
            }
            "GROUP_GET_DEVICE_FD" => {
                // SAFETY: the call takes the address of a terminated string.
                let name = unsafe { std::ffi::CStr::from_ptr(argument.cast()) }.to_str().unwrap().to_owned();
                note(self, name.clone());
                let open = |path| OpenOptions::new().read(true).write(true).open(path).map(File::into_raw_fd);
                return fails
                    .and_then(|_| open(self.folder.path().join("dev").join(name)).map_err(|_| libc::ENODEV));
            }
            _ => {}
        }
        // SAFETY: the call takes the address of a structure that begins with its length.
        let words = unsafe {
            std::slice::from_raw_parts_mut(argument.cast::<u32>(), *argument.cast::<u32>() as usize / 4)
        };
        // File descriptors and process addresses differ in each run.
        let given = match call {
            "DEVICE_BIND_IOMMUFD" => {
                format!("{:x?} {} {:x?}", &words[..2], self.name(words[2] as i32), &words[3..])
            }
            "IOAS_MAP_FILE" => {
                format!("{:x?} {} {:x?}", &words[..3], self.name(words[3] as i32), &words[4..])
            }
            "IOAS_IOVA_RANGES" => format!("{:x?} {:x?}", &words[..4], &words[6..]),
            "IOMMU_GET_INFO" => words[0].to_string(),
            "DEVICE_SET_IRQS" => {
                let files = words[5..].iter().map(|file| if *file == u32::MAX { " none" } else { " event" });
                format!("{:x?}{}", &words[..5], files.collect::<String>())
            }
            _ => format!("{words:x?}"),
        };
        note(self, given);
        fails?;
        match call {
            "IOAS_ALLOC" => words[2] = 7,
            "IOAS_IOVA_RANGES" => {
                let (ranges, page_sizes) = &self.ranges;
                assert!(words[2] as usize >= ranges.len());
                // SAFETY: the structure points to this many ranges.
                let places = unsafe {
                    std::slice::from_raw_parts_mut(
                        whole(&words[4..6]) as usize as *mut [u64; 2],
                        words[2] as usize,
                    )
                };
                places.iter_mut().zip(ranges).for_each(|(place, (first, last))| *place = [*first, *last]);
                words[2] = ranges.len() as u32;
                words[6..8].copy_from_slice(&halves(*page_sizes));
            }
            "IOAS_UNMAP" | "IOMMU_UNMAP_DMA" => {
                let len = whole(&words[4..6]);
                words[4..6].copy_from_slice(&halves(self.unmapped.unwrap_or(len)));
            }
            "GROUP_GET_STATUS" => words[1] = self.group_flags,
            "DEVICE_GET_REGION_INFO" => {
                let (flags, bytes, offset) = self.regions[words[2] as usize];
                words[1] = flags;
                words[4..6].copy_from_slice(&halves(bytes));
                words[6..8].copy_from_slice(&halves(offset));
            }
            "DEVICE_GET_IRQ_INFO" => {
                let (flags, count) = self.irqs[words[2] as usize];
                (words[1], words[3]) = (flags, count);
            }
            "DEVICE_SET_IRQS" if self.irqs_left != 0 => return Ok(self.irqs_left),
            "DEVICE_SET_IRQS" => self.set_irqs(words),
            "IOMMU_GET_INFO" => {
                let info = self.info.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word));
                words.iter_mut().zip(info).for_each(|(word, answer)| *word = answer);
                words[0] = self.info.len() as u32;
            }
            _ => {}
        }
        Ok(0)
    }

    /// DATA_NONE is 1, DATA_EVENTFD 4, ACTION_UNMASK 16, ACTION_TRIGGER 32.
    fn set_irqs(&mut self, words: &[u32]) {
        let (flags, index, start, count) = (words[1], words[2], words[3], words[4]);
        match flags {
            0x21 => {
                assert_eq!((start, count), (0, 0), "the call raises interrupts where it names some");
                self.events.retain(|at, _| at.0 != index);
            }
            0x24 => {
                assert_eq!(words.len(), 5 + count as usize);
                for (number, file) in (start..start + count).zip(&words[5..]) {
                    self.events.remove(&(index, number));
                    if *file != u32::MAX {
                        // SAFETY: the call takes an open file descriptor.
                        let file = unsafe { BorrowedFd::borrow_raw(file.cast_signed()) };
                        self.events.insert((index, number), file.try_clone_to_owned().unwrap().into());
                    }
                }
            }
            0x11 => assert_eq!((start, count), (0, 1)),
            flags => panic!("flags {flags:#x}"),
        }
    }
}
