//! Help, and what is said of wrong arguments, in lines that the terminal has room for, without a library that asks the terminal for its width.

use std::io::Write;

use clap::{Arg, Command};

use crate::look::{columns, shown, wrap_at, wrap_lines};

/// What stands before each line of an option's or a command's help.
const INDENT: usize = 10;

/// `command` with its help, and that of all below it, in lines that fit.
pub fn fitted(command: Command) -> Command {
    let about = command.get_about().map(|about| lines(&about.to_string(), columns() - INDENT));
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    let mut command = command.next_line_help(true).mut_args(fitted_argument);
    if let Some(about) = about {
        command = command.about(about);
    }
    for name in names {
        command = command.mut_subcommand(name, fitted);
    }
    command
}

/// The help of an argument, with its default and what may be said, as clap would put it behind.
fn fitted_argument(argument: Arg) -> Arg {
    let mut help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let defaults = argument.get_default_values();
    // Flags have neither, and clap's checks in a debug build refuse that theirs are hidden.
    let takes_values = argument.get_action().takes_values();
    let shows_default = !argument.is_hide_default_value_set() && takes_values;
    if shows_default && !defaults.is_empty() {
        let defaults: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
        help.push_str(&format!(" [default: {}]", defaults.join(", ")));
    }
    let mut list = String::new();
    if takes_values && !argument.is_hide_possible_values_set() {
        let values = argument.get_possible_values();
        if values.iter().any(|value| value.get_help().is_some()) {
            for value in &values {
                let about = value.get_help().map(ToString::to_string).unwrap_or_default();
                let text = format!("- {}: {about}", value.get_name());
                list.push('\n');
                list.push_str(wrap_at(&text, "  ", columns() - INDENT).trim_end());
            }
        } else if !values.is_empty() {
            let names: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
            help.push_str(&format!(" [possible values: {}]", names.join(", ")));
        }
    }
    let help = lines(help.trim_start(), columns() - INDENT) + &list;
    argument.help(help).hide_default_value(takes_values).hide_possible_values(takes_values)
}

/// Ends the program as clap does, with the message in lines that fit.
pub fn exit(error: &clap::Error) -> ! {
    if !error.use_stderr() {
        error.exit()
    }
    // What was typed is in it.
    let text = wrap_lines(&shown(&error.render().ansi().to_string()), "  ");
    // The program that read standard error may have ended.
    let _ = anstream::stderr().write_all(text.as_bytes());
    std::process::exit(error.exit_code())
}

fn lines(text: &str, columns: usize) -> String {
    wrap_at(text, "", columns).trim_end().to_owned()
}
