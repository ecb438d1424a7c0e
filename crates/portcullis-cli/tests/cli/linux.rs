//! The commands for this machine's devices, on this machine, of which they change nothing here: `tests/linux` has machines made up.

use serde_json::Value;

use super::{portcullis, shape, stderr, stdout};

#[test]
fn status_has_the_documented_fields_with_or_without_the_module() {
    let output = portcullis(&["status", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shape::documented("linux.md").wrong_with(&json), [""; 0]);
    assert_eq!((&json["schema"], &json["options"]["device"]), (&1.into(), &Value::Null));
    let text = portcullis(&["status"]);
    assert_eq!(text.status.code(), Some(0), "{}", stderr(&text));
    let is_loaded = std::path::Path::new("/sys/kernel/portcullis/protect").exists();
    assert_eq!(json["module"]["loaded"], is_loaded);
    assert_eq!(stdout(&text).contains("The module portcullis is not loaded"), !is_loaded);
}

#[test]
fn a_device_that_is_not_there_is_an_error_and_nothing_else_happens() {
    for arguments in [
        &["status", "no-such-device"][..],
        &["protect", "no-such-device", "--policy", "strict", "--yes"],
        &["unprotect", "no-such-device", "--yes"],
    ] {
        let output = portcullis(arguments);
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        // A user who is not root reads that first.
        assert!(
            message.contains("there is no device no-such-device") || message.contains("sudo"),
            "{message}"
        );
        assert!(stdout(&output).is_empty());
    }
}

#[test]
fn doctor_has_the_documented_fields_and_says_by_its_code_whether_there_is_something_to_do() {
    let output = portcullis(&["doctor", "--json", "--seconds", "0"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shape::documented("doctor.md").wrong_with(&json), [""; 0]);
    assert_eq!((&json["schema"], &json["options"]["root"]), (&1.into(), &Value::Null));
    let severities =
        json["findings"].as_array().unwrap().iter().map(|finding| finding["severity"].as_str().unwrap());
    let is_more = severities.into_iter().any(|severity| severity != "notice");
    assert_eq!(output.status.code(), Some(i32::from(is_more)), "{}", stderr(&output));
    let text = portcullis(&["doctor", "--seconds", "0"]);
    assert_eq!(text.status.code(), output.status.code());
    assert!(stdout(&text).starts_with("Kernel: Linux "), "{}", stdout(&text));
}
