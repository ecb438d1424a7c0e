//! Interned device names.

use rustc_hash::FxHashMap;

use super::op::DeviceId;

/// Names that are compared before the map is used: traces rarely have more devices.
const NEAR: usize = 4;

/// Whether `asked` names the device `name`: in full, or by its last parts, such as `03.0` of `0000:00:03.0`.
pub fn is_named(asked: &str, name: &str) -> bool {
    name.strip_suffix(asked).is_some_and(|rest| rest.is_empty() || (!asked.is_empty() && rest.ends_with(':')))
}

/// All devices, and whether their mappings are selected.
#[derive(Debug, Default)]
pub(super) struct Devices {
    names: Vec<Box<[u8]>>,
    wanted: Vec<bool>,
    ids: FxHashMap<Box<[u8]>, DeviceId>,
    only: Option<String>,
}

impl Devices {
    /// With `only`, the devices that it does not [name](is_named) are not selected.
    pub(super) fn new(only: Option<String>) -> Self {
        Self { only, ..Self::default() }
    }

    /// The number of `name`, and whether it is selected; appends a new name to `list`.
    pub(super) fn intern(&mut self, name: &[u8], list: &mut Vec<String>) -> (DeviceId, bool) {
        let near = self.names.iter().take(NEAR).position(|known| **known == *name);
        let id = match near.and_then(|at| u32::try_from(at).ok()) {
            Some(at) => DeviceId(at),
            None => match self.ids.get(name) {
                Some(&id) => id,
                None => self.add(name, list),
            },
        };
        (id, self.wanted.get(id.0 as usize).copied().unwrap_or(false))
    }

    fn add(&mut self, name: &[u8], list: &mut Vec<String>) -> DeviceId {
        let id = DeviceId(u32::try_from(self.names.len()).unwrap_or(u32::MAX));
        self.names.push(name.into());
        self.ids.insert(name.into(), id);
        let text = String::from_utf8_lossy(name).into_owned();
        self.wanted.push(self.only.as_ref().is_none_or(|only| is_named(only, &text)));
        list.push(text);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `intern` compares the first [`NEAR`] names directly, and finds others by a map: a name has one number.
    #[test]
    fn a_name_has_one_number() {
        let (mut devices, mut list) = (Devices::new(None), Vec::new());
        let names = [0, 1, 2, 3, 4, 5].map(|number| format!("0000:0{number}:00.0"));
        for _ in 0..2 {
            let numbers = names.each_ref().map(|name| devices.intern(name.as_bytes(), &mut list));
            assert_eq!(numbers, [0, 1, 2, 3, 4, 5].map(|number| (DeviceId(number), true)));
        }
        assert_eq!(list, names);
        assert!(list.len() > NEAR);
    }

    #[test]
    fn a_device_is_named_by_its_last_parts() {
        let name = "0000:00:03.0";
        assert!(["0000:00:03.0", "00:03.0", "03.0"].iter().all(|asked| is_named(asked, name)));
        assert!(
            !["", "3.0", ".0", "0", "1:00:03.0", "0000:00:03", "03.1", "x0000:00:03.0"]
                .iter()
                .any(|asked| is_named(asked, name))
        );
        assert!(is_named("iommu", "iommu") && is_named("", "") && !is_named("mmu", "iommu"));
    }
}
