{{- define "specdecode.fullname" -}}
{{- if not (hasKey .Values "leaderElection") -}}
{{- fail "the values of an older chart are in use: repeat helm upgrade with --reset-then-reuse-values" -}}
{{- end -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-scoped names carry the namespace, so that releases of one name in two namespaces do not meet. */}}
{{- define "specdecode.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "specdecode.fullname" .) -}}
{{- end -}}

{{/* Releases before leader election used an account of the release's name. Their operator must not write while the
     operators of this version run: with an account of another name it loses its rights when the bindings change,
     which helm does before it touches the Deployment. */}}
{{- define "specdecode.serviceAccountName" -}}
{{- default (printf "%s-operator" (include "specdecode.fullname" .)) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "specdecode.leaseName" -}}
{{- default (include "specdecode.fullname" .) .Values.leaderElection.leaseName -}}
{{- end -}}

{{- define "specdecode.selector" -}}
app.kubernetes.io/name: specdecode-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "specdecode.labels" -}}
{{ include "specdecode.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: specdecode
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "specdecode.image" -}}
{{- printf "%s:%s" .Values.image.repository .Values.image.tag -}}
{{- end -}}

{{/* Whether pods name their user: on OpenShift the namespace assigns it, and its admission refuses any other. */}}
{{- define "specdecode.fixedUser" -}}
{{- if eq (toString .Values.openshift) "auto" -}}
{{- not (.Capabilities.APIVersions.Has "security.openshift.io/v1") -}}
{{- else -}}
{{- not .Values.openshift -}}
{{- end -}}
{{- end -}}

{{/* Both pods of the chart fit the restricted Pod Security Standard, and OpenShift's restricted-v2. */}}
{{- define "specdecode.podSecurity" -}}
runAsNonRoot: true
{{- if eq (include "specdecode.fixedUser" .) "true" }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "specdecode.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
