"use strict";
(function () {
  var rows = Array.prototype.slice.call(document.querySelectorAll("tr[data-status]"));
  var buttons = Array.prototype.slice.call(document.querySelectorAll("button[data-show]"));
  var search = document.querySelector("input[type=search]");
  var none = document.querySelector(".none");
  var shown = "all";

  function apply() {
    var words = (search ? search.value : "").toLowerCase().split(/\s+/);
    var left = 0;
    rows.forEach(function (row) {
      var text = row.textContent.toLowerCase();
      var fits = shown === "all" || row.getAttribute("data-status") === shown;
      row.hidden = !fits || !words.every(function (word) { return text.indexOf(word) >= 0; });
      left += row.hidden ? 0 : 1;
    });
    if (none) { none.hidden = left > 0; }
  }
  buttons.forEach(function (button) {
    button.addEventListener("click", function () {
      shown = button.getAttribute("data-show");
      buttons.forEach(function (other) { other.setAttribute("aria-pressed", String(other === button)); });
      apply();
    });
  });
  if (search) { search.addEventListener("input", apply); }

  function select(element) {
    var range = document.createRange();
    range.selectNodeContents(element);
    var selection = window.getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  }
  function done(button, word) {
    button.textContent = word;
    window.setTimeout(function () { button.textContent = "copy"; }, 1500);
  }
  Array.prototype.forEach.call(document.querySelectorAll("button[data-copy]"), function (button) {
    var code = button.parentNode.querySelector("code");
    button.hidden = false;
    button.addEventListener("click", function () {
      if (navigator.clipboard) {
        navigator.clipboard.writeText(code.textContent).then(
          function () { done(button, "copied"); },
          function () { select(code); done(button, "selected"); }
        );
      } else {
        select(code);
        done(button, "selected");
      }
    });
  });
  Array.prototype.forEach.call(document.querySelectorAll(".bar"), function (bar) { bar.hidden = false; });
  window.addEventListener("beforeprint", function () {
    Array.prototype.forEach.call(document.querySelectorAll("details"), function (one) { one.open = true; });
  });
})();
